// C interface of the streaming watershed.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <new>

#include "block_watershed.hpp"
#include "streaming_watershed.hpp"

extern "C" {

// Creates a watershed to which planes can be added; returns null if there is not enough memory.
//
// size                size of the volume, [Z, Y, X]
// along_y             whether planes arrive along y instead of along z, each with its full extent along z
// threshold           score above which a voxel is foreground
// depth               minimum depth of a pass below the lower of two peaks of separate objects, in units of the distance
// heights_are_logits  whether heights are logits of the distance
// block_voxels        number of voxels that are processed together
void *stackseg_watershed(const int64_t *size, int32_t along_y, float threshold, double depth, int32_t heights_are_logits,
                         int64_t block_voxels) {
  try {
    return new StreamingWatershed(size, along_y, threshold, {depth, heights_are_logits != 0}, block_voxels);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void stackseg_free(void *watershed) { delete static_cast<StreamingWatershed *>(watershed); }

// Adds the next planes; returns 0, or -1 if there is not enough memory.
//
// heights     float32 or bfloat16 according to `kind`, as in `Planes`, with strides along planes, rows and columns
// foreground  foreground scores, or a mask of bytes
int32_t stackseg_planes(void *watershed, const void *heights, int32_t kind, const int64_t *strides, const void *foreground,
                        int32_t foreground_kind, const int64_t *foreground_strides, int64_t planes) {
  try {
    static_cast<StreamingWatershed *>(watershed)
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
    return static_cast<StreamingWatershed *>(watershed)->join(min_voxels, drop_border);
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// After `stackseg_objects`, writes [objects, 3]: number of voxels, sum of their probabilities, distance at the peak.
void stackseg_object_properties(const void *watershed, double *properties) {
  for (const auto &object : static_cast<const StreamingWatershed *>(watershed)->object_properties())
    properties = std::copy(object.begin(), object.end(), properties);
}

// Writes the labels [Z, Y, X]. Call it once after each call to `stackseg_objects`.
//
// numbers  [objects + 1]: label of the background, which is 0, followed by the label of each object
// bytes    bytes per label: 2 or 4
void stackseg_write_labels(void *watershed, const int32_t *numbers, void *labels, int32_t bytes) {
  StreamingWatershed &joined_watershed = *static_cast<StreamingWatershed *>(watershed);
  joined_watershed.renumber(numbers);
  if (bytes == 2)
    joined_watershed.label(static_cast<uint16_t *>(labels));
  else
    joined_watershed.label(static_cast<uint32_t *>(labels));
}

// Computes the watershed of one block of a height map; returns null if there is not enough memory. `geometry`
// contains the size, origin and volume of `BlockWatershed`; the other arguments are as in `BlockWatershed` and
// `stackseg_planes`.
void *stackseg_block(const int64_t *geometry, const int32_t *margins, float threshold, double depth, int32_t heights_are_logits,
                     const void *heights, int32_t kind, const int64_t *strides, const void *foreground, int32_t foreground_kind,
                     const int64_t *foreground_strides, int32_t *pieces) {
  try {
    return new BlockWatershed(geometry, geometry + 3, geometry + 6, margins, threshold, {depth, heights_are_logits != 0},
                              {heights, kind, strides}, {foreground, foreground_kind, foreground_strides}, pieces);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

// Returns the number of pieces of a block.
int64_t stackseg_block_pieces(const void *block) { return static_cast<const BlockWatershed *>(block)->pieces().size(); }

// Returns the number of passes between the pieces of a block.
int64_t stackseg_block_passes(const void *block) { return static_cast<const BlockWatershed *>(block)->passes().size(); }

// Writes the properties of pieces [pieces, 4]: position of the end in the volume, number of voxels, sum of their
// probabilities, and key at the end. Writes passes [passes, 3]: the numbers of two pieces, and the key of their pass.
void stackseg_block_properties(const void *block, int64_t *pieces, int32_t *passes) {
  for (const Piece &piece : static_cast<const BlockWatershed *>(block)->pieces())
    for (const int64_t property : std::initializer_list<int64_t>{piece.position, piece.voxels, piece.foreground, piece.key})
      *pieces++ = property;
  for (const auto &pass : static_cast<const BlockWatershed *>(block)->passes())
    passes = std::copy(pass.begin(), pass.end(), passes);
}

void stackseg_block_free(void *block) { delete static_cast<BlockWatershed *>(block); }
}
