// C interface of the watershed.

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "block_watershed.hpp"

extern "C" {

// Creates a watershed to which blocks can be added; returns null if there is not enough memory.
//
// volume              size of the volume, [Z, Y, X]
// area                box in the volume that contains all blocks
// axis                axis along which blocks are added: 0 for z, 1 for y
// threshold           score above which a voxel is foreground
// depth               minimum depth of a pass below the lower of two peaks of separate objects, in units of the distance
// heights_are_logits  whether heights are logits of the distance
// probabilities       fixed-point probability of each code of a foreground score, [256]
// pieces              output: piece of each voxel in the area, from 1; 0 for background. Must exist as long as the watershed
void *stackseg_watershed(const Index *volume, const Box *area, int32_t axis, float threshold, double depth,
                         int32_t heights_are_logits, const int32_t *probabilities, int32_t *pieces) {
  try {
    return new BlockWatershed(*volume, *area, axis, threshold, {depth, heights_are_logits != 0}, probabilities, pieces);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void stackseg_free(void *watershed) { delete static_cast<BlockWatershed *>(watershed); }

// Adds the next block, which may be empty, and writes the pieces of its voxels. Returns 0, or -1 if there is not enough memory.
//
// scores     scores of the block and its neighbors in the volume, except for the last two planes of the previous block
// workspace  13 bytes for each voxel in the block and in a margin of one voxel on every side, and for one more voxel
int32_t stackseg_block(void *watershed, const Box *box, const Scores *scores, int32_t *workspace, int32_t threads) {
  try {
    static_cast<BlockWatershed *>(watershed)->add(*box, *scores, workspace, threads);
    return 0;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// Writes the numbers of pieces and of passes between them, and returns the pieces in `pieces` and the passes in `passes`.
void stackseg_pieces(void *watershed, int64_t *counts, const Piece **pieces, const Pass **passes) {
  const BlockWatershed &blocks = *static_cast<BlockWatershed *>(watershed);
  counts[0] = blocks.ends().size() - 1, counts[1] = blocks.passes().size();
  *pieces = blocks.ends().data() + 1, *passes = blocks.passes().data();
}

// Writes the label of each voxel, given its piece, [voxels] each.
//
// label_of_piece  label of the background, which is 0, followed by the label of each piece
// bytes           bytes per label: 2 or 4
void stackseg_look_up(const int32_t *pieces, int64_t voxels, const void *label_of_piece, void *labels, int32_t bytes,
                      int32_t threads) {
  constexpr int64_t VOXELS_PER_PART = int64_t(1) << 18;
  run_parallel(threads, (voxels + VOXELS_PER_PART - 1) / VOXELS_PER_PART, [&](int64_t part, int) {
    const int64_t end = std::min(voxels, (part + 1) * VOXELS_PER_PART);
    for (int64_t voxel = part * VOXELS_PER_PART; voxel < end; ++voxel)
      if (bytes == 2)
        static_cast<uint16_t *>(labels)[voxel] = static_cast<const uint16_t *>(label_of_piece)[pieces[voxel]];
      else
        static_cast<uint32_t *>(labels)[voxel] = static_cast<const uint32_t *>(label_of_piece)[pieces[voxel]];
  });
}

// Merges pairs of basins [2, count] in order; see `merge_in_python`.
void stackseg_merge(const double *peaks, const int64_t *pairs, const double *heights, int64_t count, double depth,
                    int64_t *link) {
  for (int64_t pair = 0; pair < count; ++pair) {
    int64_t high = root_of(link, pairs[pair]), low = root_of(link, pairs[count + pair]);
    if (peaks[high] < peaks[low])
      std::swap(high, low);
    if (high != low && peaks[low] - heights[pair] < depth)
      link[low] = high;
  }
}
}
