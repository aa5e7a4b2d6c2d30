// C interface of the watershed.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>

#include "volume_watershed.hpp"

extern "C" {

// Creates a watershed to which slabs can be added; returns null if there is not enough memory.
//
// size                size of the volume, [Z, Y, X]
// along_y             whether slabs arrive along y instead of along z, each with its full extent along z
// threshold           score above which a voxel is foreground
// depth               minimum depth of a pass below the lower of two peaks of separate objects, in units of the distance
// heights_are_logits  whether heights are logits of the distance
// block_planes        maximum number of planes that are processed together
// threads             maximum number of threads
void *stackseg_watershed(const int64_t *size, int32_t along_y, float threshold, double depth, int32_t heights_are_logits,
                         int64_t block_planes, int32_t threads) {
  try {
    return new VolumeWatershed({size[0], size[1], size[2]}, along_y, threshold, {depth, heights_are_logits != 0}, block_planes,
                               threads);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void stackseg_free(void *watershed) { delete static_cast<VolumeWatershed *>(watershed); }

// Adds the next slab; returns 0, or -1 if there is not enough memory.
//
// heights     float32 or bfloat16 according to `kind`, as in `Values`
// foreground  foreground scores, or a mask of bytes
int32_t stackseg_slab(void *watershed, const void *heights, int32_t kind, const int64_t *strides, const void *foreground,
                      int32_t foreground_kind, const int64_t *foreground_strides, int64_t planes) {
  try {
    static_cast<VolumeWatershed *>(watershed)
        ->add({heights, kind, strides}, {foreground, foreground_kind, foreground_strides}, planes);
    return 0;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// Returns the number of objects after all planes have been added, or -1 if there is not enough memory.
//
// min_voxels   minimum number of voxels of an object
// drop_border  whether to remove objects that touch a face of the volume
int64_t stackseg_objects(void *watershed, int64_t min_voxels, int32_t drop_border) {
  try {
    return static_cast<VolumeWatershed *>(watershed)->join(min_voxels, drop_border);
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// After `stackseg_objects`, writes [objects, 3]: number of voxels, sum of their probabilities, distance at the peak.
void stackseg_object_properties(const void *watershed, double *properties) {
  for (const auto &object : static_cast<const VolumeWatershed *>(watershed)->object_properties())
    properties = std::copy(object.begin(), object.end(), properties);
}

// Writes the labels [Z, Y, X]. Call it once after each call to `stackseg_objects`.
//
// numbers  [objects + 1]: label of the background, which is 0, followed by the label of each object
// bytes    bytes per label: 2 or 4
void stackseg_write_labels(void *watershed, const int32_t *numbers, void *labels, int32_t bytes) {
  VolumeWatershed &joined_watershed = *static_cast<VolumeWatershed *>(watershed);
  if (bytes == 2)
    joined_watershed.label(numbers, static_cast<uint16_t *>(labels));
  else
    joined_watershed.label(numbers, static_cast<uint32_t *>(labels));
}

// Computes the watershed of one block of a height map; returns null if there is not enough memory.
//
// geometry  first voxel of the block and voxel after its last one, size of the volume, and first voxel of `heights`
// heights, foreground  as in `stackseg_slab`, of the voxels in the block and of their neighbors in the volume
// pieces    output [Z, Y, X]: 0 for background, else the number of a piece, from 1
void *stackseg_block(const int64_t *geometry, float threshold, double depth, int32_t heights_are_logits, const void *heights,
                     int32_t kind, const int64_t *strides, const void *foreground, int32_t foreground_kind,
                     const int64_t *foreground_strides, int32_t *pieces) {
  try {
    Index index[4];
    std::copy_n(geometry, 12, index[0].data());
    const Scores scores({heights, kind, strides}, {foreground, foreground_kind, foreground_strides}, index[3], threshold);
    const Box box{index[0], index[1]};
    auto block = std::make_unique<BlockWatershed>(index[2], Persistence{depth, heights_are_logits != 0}, 1);
    block->add(box,
               [&](const Index &voxel, int64_t count, int32_t *keys, uint8_t *codes) {
                 scores.write_row(voxel, count, keys, codes);
               },
               nullptr);
    block->write_pieces(pieces, box.length(1) * box.length(2), box.length(2));
    return block.release();
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

// Returns the number of pieces of a block.
int64_t stackseg_block_pieces(const void *block) { return static_cast<const BlockWatershed *>(block)->ends().size() - 1; }

// Returns the number of passes between the pieces of a block.
int64_t stackseg_block_passes(void *block) { return static_cast<BlockWatershed *>(block)->passes().size(); }

// Writes the properties of pieces [pieces, 4]: position of the end in the volume, number of voxels, sum of their
// probabilities, and key at the end. Writes passes [passes, 3]: the numbers of two pieces, and the key of their pass.
void stackseg_block_properties(void *block, int64_t *pieces, int32_t *passes) {
  const std::vector<Piece> &ends = static_cast<BlockWatershed *>(block)->ends();
  for (auto piece = ends.begin() + 1; piece != ends.end(); ++piece)
    for (const int64_t property : std::initializer_list<int64_t>{piece->position, piece->voxels, piece->foreground, piece->key})
      *pieces++ = property;
  for (const Pass &pass : static_cast<BlockWatershed *>(block)->passes())
    for (const int32_t property : {pass.first, pass.second, pass.key})
      *passes++ = property;
}

void stackseg_block_free(void *block) { delete static_cast<BlockWatershed *>(block); }
}
