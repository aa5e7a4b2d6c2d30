// C interface of the watershed.

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "volume_watershed.hpp"

extern "C" {

// Creates a watershed to which slabs or blocks can be added; returns null if there is not enough memory.
//
// size                size of the volume, [Z, Y, X]
// along_y             whether slabs arrive along y instead of along z, each with its full extent along z
// threshold           score above which a voxel is foreground
// depth               minimum depth of a pass below the lower of two peaks of separate objects, in units of the distance
// heights_are_logits  whether heights are logits of the distance
// block_planes        maximum number of planes of a slab that are processed together
// threads             maximum number of threads
// pieces              output: 0 for background, else the number of a piece, from 1. Memory [Z, Y, X] for the volume or,
//                     if a block is added, [z, y, x] for this block. Must exist as long as the watershed
void *stackseg_watershed(const int64_t *size, int32_t along_y, float threshold, double depth, int32_t heights_are_logits,
                         int64_t block_planes, int32_t threads, int32_t *pieces) {
  try {
    return new VolumeWatershed({size[0], size[1], size[2]}, along_y, threshold, {depth, heights_are_logits != 0}, block_planes,
                               threads, pieces);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void stackseg_free(void *watershed) { delete static_cast<VolumeWatershed *>(watershed); }

// Adds the next slab; returns 0, or -1 if there is not enough memory.
//
// heights, foreground  float32 or bfloat16 according to `kind`, as in `Values`
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

// Adds a block; returns 0, or -1 if there is not enough memory.
//
// geometry  first voxel of the block and voxel after its last one, and first voxel of `heights`
// heights, foreground  as in `stackseg_slab`, of the voxels in the block and of their neighbors in the volume
int32_t stackseg_block(void *watershed, const void *heights, int32_t kind, const int64_t *strides, const void *foreground,
                       int32_t foreground_kind, const int64_t *foreground_strides, const int64_t *geometry) {
  try {
    Index index[3];
    std::copy_n(geometry, 9, index[0].data());
    static_cast<VolumeWatershed *>(watershed)
        ->add_block({index[0], index[1]}, {heights, kind, strides}, {foreground, foreground_kind, foreground_strides}, index[2]);
    return 0;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// Writes the number of pieces and the number of passes between them.
void stackseg_counts(void *watershed, int64_t *counts) {
  BlockWatershed &blocks = static_cast<VolumeWatershed *>(watershed)->blocks();
  counts[0] = blocks.ends().size() - 1, counts[1] = blocks.passes().size();
}

// Writes the properties of pieces [4, pieces]: position of the end in the volume, key at the end, number of voxels, and sum of
// their probabilities. Writes passes [3, passes]: the numbers of two pieces, from 0, and the key of their pass.
void stackseg_properties(void *watershed, int64_t *properties, int32_t *passes) {
  BlockWatershed &blocks = static_cast<VolumeWatershed *>(watershed)->blocks();
  const int64_t piece_count = blocks.ends().size() - 1, pass_count = blocks.passes().size();
  for (int64_t number = 0; number < piece_count; ++number) {
    const Piece &piece = blocks.ends()[number + 1];
    const int64_t values[] = {piece.position, piece.key, piece.voxels, piece.foreground};
    for (int row = 0; row < 4; ++row)
      properties[row * piece_count + number] = values[row];
  }
  for (int64_t number = 0; number < pass_count; ++number) {
    const Pass &pass = blocks.passes()[number];
    const int32_t values[] = {pass.first - 1, pass.second - 1, pass.key};
    for (int row = 0; row < 3; ++row)
      passes[row * pass_count + number] = values[row];
  }
}

// Writes the label of each voxel, given its piece, [voxels] each.
//
// label_of_piece  label of the background, which is 0, followed by the label of each piece
// bytes           bytes per label: 2 or 4
void stackseg_look_up(const int32_t *pieces, int64_t voxels, const void *label_of_piece, void *labels, int32_t bytes,
                      int32_t threads) {
  constexpr int64_t VOXELS_PER_PART = int64_t(1) << 18;
  ThreadPool::get().run(threads, (voxels + VOXELS_PER_PART - 1) / VOXELS_PER_PART, [&](int64_t part, int) {
    const int64_t end = std::min(voxels, (part + 1) * VOXELS_PER_PART);
    for (int64_t voxel = part * VOXELS_PER_PART; voxel < end; ++voxel)
      if (bytes == 2)
        static_cast<uint16_t *>(labels)[voxel] = static_cast<const uint16_t *>(label_of_piece)[pieces[voxel]];
      else
        static_cast<uint32_t *>(labels)[voxel] = static_cast<const uint32_t *>(label_of_piece)[pieces[voxel]];
  });
}

// Merges pairs of basins [count] in order; see `merge_in_python`.
void stackseg_merge(const double *peaks, const int64_t *first, const int64_t *second, const double *heights, int64_t count,
                    double depth, int64_t *link) {
  for (int64_t pair = 0; pair < count; ++pair) {
    int64_t high = root_of(link, first[pair]), low = root_of(link, second[pair]);
    if (peaks[high] < peaks[low])
      std::swap(high, low);
    if (high != low && peaks[low] - heights[pair] < depth)
      link[low] = high;
  }
}
}
