// The ascent of a watershed in planes: keys of heights, where every voxel of a block climbs to, and the passes near the
// tops. `service/watershed.py` says what is computed, and computes the same with torch.
//
// A block is a run of planes with a rim of background around each, in flat memory, so that the 26 neighbours of a voxel
// are at fixed distances; its first and last plane are only looked at. Whatever stands in `pieces` below zero is, while a
// block is worked on, the complement of the place that a voxel's highest neighbour has in the block.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int32_t BACKGROUND = INT32_MIN;
constexpr int32_t PLACE_BITS = 31;
constexpr int NEIGHBOURS = 26;

// In the same order as the heights; the bits of the place are zero.
inline int32_t key_of(float height) {
  int32_t bits;
  std::memcpy(&bits, &height, sizeof bits);
  return (bits ^ ((bits >> 31) & INT32_MAX)) & ~PLACE_BITS;
}

inline int32_t highest_of(int32_t a, int32_t b, int32_t c) { return std::max(std::max(a, b), c); }

// The highest key among each voxel of one plane and its 8 neighbours there; nothing for the rim.
void widen(const int32_t *keys, int64_t size, int64_t width, int32_t *along_x, int32_t *highest) {
  for (int64_t i = 1; i < size - 1; ++i)
    along_x[i] = highest_of(keys[i - 1], keys[i], keys[i + 1]);
  for (int64_t i = width + 1; i < size - width - 1; ++i)
    highest[i] = highest_of(along_x[i - width], along_x[i], along_x[i + width]);
}

template <typename Label>
void look_up(const int32_t *pieces, int64_t plane, int64_t row, const int64_t *size, const int32_t *numbers,
             int64_t count, Label *labels) {
  for (int64_t z = 0; z < size[0]; ++z)
    for (int64_t y = 0; y < size[1]; ++y) {
      const int32_t *const from = pieces + z * plane + y * row;
      for (int64_t x = 0; x < size[2]; ++x)
        *labels++ = from[x] >= 0 && from[x] < count ? static_cast<Label>(numbers[from[x]]) : Label(0);
    }
}

} // namespace

// Writes the keys of whole planes into the inside of their rims.
//
// heights, inside  [planes, rows - 2, width - 2]
// codes            [rows - 2, width - 2]: the place of each voxel of a plane, modulo 3 along y and x
// z, weight        where the first plane is in the volume, and what a plane more adds, modulo 3, to the place of a voxel
// keys             [planes, rows, width]
extern "C" void stackseg_fill(const float *heights, const uint8_t *inside, const int32_t *codes, int64_t planes,
                              int64_t rows, int64_t width, int64_t z, int64_t weight, int32_t *keys) {
  const int64_t across = width - 2;
  for (int64_t i = 0; i < planes; ++i) {
    const int32_t level = static_cast<int32_t>(weight * ((z + i) % 3));
    for (int64_t y = 0; y < rows - 2; ++y) {
      const int64_t row = (i * (rows - 2) + y) * across;
      int32_t *const out = keys + (i * rows + y + 1) * width + 1;
      for (int64_t x = 0; x < across; ++x)
        out[x] = inside[row + x] ? key_of(heights[row + x]) + level + codes[y * across + x] : BACKGROUND;
    }
  }
}

// Notes for every voxel of the foreground where its highest neighbour is; returns how many paths end. Where one ends a
// piece begins: they are numbered from `first` in the order of these places.
//
// keys        [planes, rows, width]
// steps       [1024]: from a voxel of one code to its neighbour of another
// scratch     [4, rows, width]
// pieces      [planes, rows, width] of the volume, zeros but in the first plane
// foreground  [planes, rows, width]: where its voxels are; how many there are comes in `voxels`
// targets     [planes, rows, width]: where the highest neighbour of each end is
extern "C" int64_t stackseg_climb(const int32_t *keys, int64_t planes, int64_t rows, int64_t width, int32_t first,
                                  const int32_t *steps, int32_t *scratch, int32_t *pieces, int32_t *foreground,
                                  int64_t *voxels, int32_t *targets) {
  const int64_t size = rows * width, last = (planes - 1) * size;
  int32_t *const along_x = scratch + 3 * size;
  widen(keys, size, width, along_x, scratch);
  widen(keys + size, size, width, along_x, scratch + size);
  int64_t ends = 0, count = 0;
  for (int64_t z = 1; z < planes - 1; ++z) {
    widen(keys + (z + 1) * size, size, width, along_x, scratch + (z + 1) % 3 * size);
    const int64_t before = count;
    // Without a branch, which would be guessed wrongly at the edge of every object.
    for (int64_t place = z * size; place < (z + 1) * size; ++place) {
      foreground[count] = static_cast<int32_t>(place);
      count += keys[place] != BACKGROUND;
    }
    for (int64_t n = before; n < count; ++n) {
      const int32_t place = foreground[n];
      const int32_t *const here = scratch + (place - z * size);
      const int32_t top = highest_of(here[0], here[size], here[2 * size]);
      const int32_t target = place + steps[(keys[place] & PLACE_BITS) << 5 | (top & PLACE_BITS)];
      if (target == place || target < size || target >= last) {
        pieces[place] = static_cast<int32_t>(first + ends);
        targets[ends++] = target;
      } else {
        // What lies behind may know its piece already; what lies ahead is still zero.
        pieces[place] = pieces[target] > 0 ? pieces[target] : ~target;
      }
    }
  }
  *voxels = count;
  return ends;
}

// After `stackseg_climb`: follows every path to its end.
//
// foreground, count         where the voxels of the foreground are
// targets, ends             where the highest neighbour of each end is
// low                       where the block begins in the volume with its rim
// link, place, top, voxels  of each end: the piece of its highest neighbour (0: not yet known), where in the volume
//                           that is, its key, and the size of the piece
extern "C" void stackseg_settle(const int32_t *keys, int32_t first, int64_t low, int32_t *pieces,
                                const int32_t *foreground, int64_t count, const int32_t *targets, int64_t ends,
                                int64_t *link, int64_t *place, int64_t *top, int64_t *voxels) {
  std::fill(voxels, voxels + ends, 0);
  int32_t counted = first;
  int64_t run = 0;
  for (int64_t n = 0; n < count; ++n) {
    int32_t here = foreground[n], end = here;
    while (pieces[end] < 0)
      end = ~pieces[end];
    const int32_t piece = pieces[end];
    // Every voxel on the way is visited once more, and from then on is an end for others.
    while (here != end) {
      const int32_t next = ~pieces[here];
      pieces[here] = piece;
      here = next;
    }
    // Counted in runs: one number that is raised voxel by voxel would be waited for.
    if (piece != counted) {
      voxels[counted - first] += n - run;
      counted = piece, run = n;
    }
  }
  voxels[counted - first] += count - run;
  for (int64_t i = 0; i < ends; ++i)
    link[i] = pieces[targets[i]], place[i] = low + targets[i], top[i] = keys[targets[i]];
}

// Finds the ways between voxels near the tops of the block's pieces and neighbours that belong to other pieces.
//
// foreground, count     where the voxels of the foreground are
// limits                [ends]: the least key that is near the top of each piece from `first` on
// offsets               [26]: where the neighbours are
// here, place, height   [capacity]: the piece, where in the volume the neighbour is, and the lower of the two keys
//
// Returns how many there are, which may be more than `capacity`: then only the first were written.
extern "C" int64_t stackseg_search(const int32_t *keys, int32_t first, int64_t low, const int32_t *pieces,
                                   const int32_t *foreground, int64_t count, const int32_t *limits, int64_t ends,
                                   const int32_t *offsets, int64_t capacity, int32_t *here, int64_t *place, int32_t *height) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t voxel = foreground[i], piece = pieces[voxel];
    const int64_t number = static_cast<int64_t>(piece) - first;
    if (number < 0 || number >= ends || keys[voxel] < limits[number])
      continue;
    const int32_t limit = limits[number];
    for (int n = 0; n < NEIGHBOURS; ++n) {
      const int64_t neighbour = static_cast<int64_t>(voxel) + offsets[n];
      if (pieces[neighbour] == piece || keys[neighbour] < limit)
        continue;
      if (found < capacity) {
        here[found] = piece, place[found] = low + neighbour;
        height[found] = std::min(keys[voxel], keys[neighbour]);
      }
      ++found;
    }
  }
  return found;
}

// Writes the number of every voxel's piece into labels [size[0], size[1], size[2]], of 32 bits if `wide`, else of 16.
//
// pieces          of `size`, planes and rows being so many voxels apart
// numbers, count  of each piece
extern "C" void stackseg_label(const int32_t *pieces, int64_t plane, int64_t row, const int64_t *size,
                               const int32_t *numbers, int64_t count, void *labels, int32_t wide) {
  if (wide)
    look_up(pieces, plane, row, size, numbers, count, static_cast<uint32_t *>(labels));
  else
    look_up(pieces, plane, row, size, numbers, count, static_cast<uint16_t *>(labels));
}
