// C interface of the streaming watershed.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <new>

#include "block_watershed.hpp"
#include "streaming_watershed.hpp"

extern "C" {

// Creates a watershed without planes. Returns null if memory ran out.
//
// size       size of the volume, [Z, Y, X]
// along_y    whether planes arrive along y, each with all of z, instead of along z
// threshold  score above which a voxel is foreground
// depth      how far a pass must lie below a peak to separate objects, in units of the distance
// logits     whether heights are logits of the distance
// block      number of voxels that are processed together
void *stackseg_watershed(const int64_t *size, int32_t along_y, float threshold, double depth, int32_t logits,
                         int64_t block) {
  try {
    return new StreamingWatershed(size, along_y, threshold, {depth, logits != 0}, block);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void stackseg_free(void *watershed) { delete static_cast<StreamingWatershed *>(watershed); }

// Adds the next planes. Returns 0, or -1 if memory ran out.
//
// heights  float32 or bfloat16, given by `kind` as in `Planes`; `steps` are the strides along plane, row and column
// inside   foreground scores, or a mask in bytes, with `inside_kind` and `inside_steps`
int32_t stackseg_planes(void *watershed, const void *heights, int32_t kind, const int64_t *steps, const void *inside,
                        int32_t inside_kind, const int64_t *inside_steps, int64_t planes) {
  try {
    static_cast<StreamingWatershed *>(watershed)->add({heights, kind, steps}, {inside, inside_kind, inside_steps}, planes);
    return 0;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// Finds the objects after all planes were added. Returns their number, or -1 if memory ran out.
//
// least        smallest number of voxels of an object
// drop_border  whether to drop objects that touch a face of the volume
int64_t stackseg_objects(void *watershed, int64_t least, int32_t drop_border) {
  try {
    return static_cast<StreamingWatershed *>(watershed)->join(least, drop_border);
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// Writes [objects, 3], after `stackseg_objects`: number of voxels, sum of their probabilities, distance at the peak.
void stackseg_facts(const void *watershed, double *facts) {
  for (const auto &of_one : static_cast<const StreamingWatershed *>(watershed)->facts())
    facts = std::copy(of_one.begin(), of_one.end(), facts);
}

// Writes the labels [Z, Y, X]. Call it only once after each call of `stackseg_objects`.
//
// numbers  [objects + 1], label of the background, which must be 0, and of each object
// bytes    bytes per label, 2 or 4
void stackseg_write_labels(void *watershed, const int32_t *numbers, void *labels, int32_t bytes) {
  StreamingWatershed &joined = *static_cast<StreamingWatershed *>(watershed);
  joined.renumber(numbers);
  if (bytes == 2)
    joined.label(static_cast<uint16_t *>(labels));
  else
    joined.label(static_cast<uint32_t *>(labels));
}

// Computes one block of a height map. Returns null if memory ran out. Arguments as for `BlockWatershed` and
// `stackseg_planes`; `geometry` consists of size, origin and volume.
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

// Return the number of pieces in a block, and the number of passes between them.
int64_t stackseg_block_pieces(const void *block) { return static_cast<const BlockWatershed *>(block)->pieces().size(); }
int64_t stackseg_block_passes(const void *block) { return static_cast<const BlockWatershed *>(block)->passes().size(); }

// Writes `pieces` [pieces, 4]: position of the end in the volume, number of voxels, sum of their probabilities, key at the
// end; and `passes` [passes, 3]: two pieces, and the key of the pass.
void stackseg_block_facts(const void *block, int64_t *pieces, int32_t *passes) {
  for (const Piece &piece : static_cast<const BlockWatershed *>(block)->pieces())
    for (const int64_t fact : std::initializer_list<int64_t>{piece.place, piece.voxels, piece.foreground, piece.top})
      *pieces++ = fact;
  for (const auto &pass : static_cast<const BlockWatershed *>(block)->passes())
    passes = std::copy(pass.begin(), pass.end(), passes);
}

void stackseg_block_free(void *block) { delete static_cast<BlockWatershed *>(block); }
}
