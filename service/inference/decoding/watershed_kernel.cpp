// C interface of the streaming watershed.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <new>

#include "block_watershed.hpp"
#include "streaming_watershed.hpp"

extern "C" {

// A height map without planes so far; null where there is no memory.
//
// size       of the volume, [Z, Y, X]
// along_y     planes come along y, each with all of z, instead of along z
// threshold  above which a voxel is inside
// depth      what a pass must be below a peak to part objects
// logits   heights are logits of the distance in which that is
// block      voxels that are worked on together
void *stackseg_watershed(const int64_t *size, int32_t along_y, float threshold, double depth, int32_t logits,
                         int64_t block) {
  try {
    return new StreamingWatershed(size, along_y, threshold, {depth, logits != 0}, block);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void stackseg_free(void *watershed) { delete static_cast<StreamingWatershed *>(watershed); }

// Takes in the next planes; gives 0, or -1 where there is no memory.
//
// heights  float32 or bfloat16 by `kind`, as `Planes` has it; `steps` between its elements along plane, row and column
// inside   the same of what decides whether a voxel is inside, which may be bytes
int32_t stackseg_planes(void *watershed, const void *heights, int32_t kind, const int64_t *steps, const void *inside,
                        int32_t inside_kind, const int64_t *inside_steps, int64_t planes) {
  try {
    static_cast<StreamingWatershed *>(watershed)->add({heights, kind, steps}, {inside, inside_kind, inside_steps}, planes);
    return 0;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// Returns the number of objects, once every plane was added, or -1 if there is no memory.
//
// least   voxels that an object must have
// drop_border   and it must not touch a face of the volume
int64_t stackseg_objects(void *watershed, int64_t least, int32_t drop_border) {
  try {
    return static_cast<StreamingWatershed *>(watershed)->join(least, drop_border);
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// After `stackseg_objects`, into [objects, 3]: voxels, the sum of their probabilities, the distance at the peak.
void stackseg_facts(const void *watershed, double *facts) {
  for (const auto &of_one : static_cast<const StreamingWatershed *>(watershed)->facts())
    facts = std::copy(of_one.begin(), of_one.end(), facts);
}

// Writes the labels [Z, Y, X], once after each call of `stackseg_objects`.
//
// numbers  [objects + 1], label of the background, which is 0, and of each object
// bytes    of a label: 2 or 4
void stackseg_write_labels(void *watershed, const int32_t *numbers, void *labels, int32_t bytes) {
  StreamingWatershed &joined = *static_cast<StreamingWatershed *>(watershed);
  joined.renumber(numbers);
  if (bytes == 2)
    joined.label(static_cast<uint16_t *>(labels));
  else
    joined.label(static_cast<uint32_t *>(labels));
}

// One block of a height map, worked on as a whole; null where there is no memory. As `BlockWatershed` and
// `stackseg_planes` have the arguments.
void *stackseg_block(const int64_t *geometry, const int32_t *margins, float threshold, double depth, int32_t logits,
                     const void *heights, int32_t kind, const int64_t *steps, const void *inside, int32_t inside_kind,
                     const int64_t *inside_steps, int32_t *pieces) {
  try {
    return new BlockWatershed(geometry, geometry + 3, geometry + 6, margins, threshold, {depth, logits != 0},
                              {heights, kind, steps}, {inside, inside_kind, inside_steps}, pieces);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

// How many pieces a block has, and how many passes between two of them.
int64_t stackseg_block_pieces(const void *block) { return static_cast<const BlockWatershed *>(block)->pieces().size(); }
int64_t stackseg_block_passes(const void *block) { return static_cast<const BlockWatershed *>(block)->passes().size(); }

// Into [pieces, 4]: the place of its end in the volume, voxels, the sum of their probabilities, the key at the end; and
// into [passes, 3]: two pieces, and the key of the pass.
void stackseg_block_facts(const void *block, int64_t *pieces, int32_t *passes) {
  for (const Piece &piece : static_cast<const BlockWatershed *>(block)->pieces())
    for (const int64_t fact : std::initializer_list<int64_t>{piece.place, piece.voxels, piece.foreground, piece.top})
      *pieces++ = fact;
  for (const auto &pass : static_cast<const BlockWatershed *>(block)->passes())
    passes = std::copy(pass.begin(), pass.end(), passes);
}

void stackseg_block_free(void *block) { delete static_cast<BlockWatershed *>(block); }
}
