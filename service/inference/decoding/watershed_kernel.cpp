// Objects of a landscape that comes in planes: keys of heights, where every voxel climbs to, the passes near the tops,
// and which basins these join. `service/inference/decoding/watershed.py` and `service/inference/decoding/decoders.py` say what is computed, and compute the
// same with torch and NumPy.
//
// A block is a run of planes with a rim of background around each, in flat memory, so that the 26 neighbours of a voxel
// are at fixed distances; its first and last plane are only looked at. Whatever stands in `pieces` below zero is, while a
// block is worked on, the complement of the place that a voxel's highest neighbour has in the block.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <unordered_map>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int32_t BACKGROUND = INT32_MIN;
constexpr int32_t PLACE_BITS = 31;
constexpr int CODES = 32, NEIGHBOURS = 26;

struct BFloat16 {
  uint16_t bits;
};

inline float widened(float value) { return value; }
inline float widened(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <typename Score> inline bool is_above(Score score, float threshold) { return widened(score) > threshold; }
inline bool is_above(uint8_t inside, float) { return inside != 0; }

// In the same order as the heights; the bits of the place are zero.
inline int32_t key_of(float height) {
  int32_t bits;
  std::memcpy(&bits, &height, sizeof bits);
  return (bits ^ ((bits >> 31) & INT32_MAX)) & ~PLACE_BITS;
}

// The inverse, but for the bits that were dropped.
inline float height_of(int32_t key) {
  const int32_t ordered = key & ~PLACE_BITS, bits = ordered ^ ((ordered >> 31) & INT32_MAX);
  float height;
  std::memcpy(&height, &bits, sizeof height);
  return height;
}

inline int32_t highest_of(int32_t a, int32_t b, int32_t c) { return std::max(std::max(a, b), c); }

// The highest key among each voxel of one plane and its 8 neighbours there; nothing for the rim.
void widen(const int32_t *keys, int64_t size, int64_t width, int32_t *along_x, int32_t *highest) {
  for (int64_t i = 1; i < size - 1; ++i)
    along_x[i] = highest_of(keys[i - 1], keys[i], keys[i + 1]);
  for (int64_t i = width + 1; i < size - width - 1; ++i)
    highest[i] = highest_of(along_x[i - width], along_x[i], along_x[i + width]);
}

// Adds the places from `begin` to `end` that are no background to `count` others, and up to 15 numbers behind them; gives
// how many there are then.
inline int64_t list_foreground(const int32_t *keys, int64_t begin, int64_t end, int32_t *places, int64_t count) {
#ifdef __AVX512F__
  const __m512i background = _mm512_set1_epi32(BACKGROUND);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; begin + 16 <= end; begin += 16) {
    const __mmask16 inside = _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(keys + begin), background);
    const __m512i here = _mm512_add_epi32(first, _mm512_set1_epi32(static_cast<int32_t>(begin)));
    _mm512_storeu_si512(places + count, _mm512_maskz_compress_epi32(inside, here));
    count += __builtin_popcount(inside);
  }
#endif
  // Without a branch, which would be guessed wrongly at the edge of every object.
  for (int64_t place = begin; place < end; ++place) {
    places[count] = static_cast<int32_t>(place);
    count += keys[place] != BACKGROUND;
  }
  return count;
}

// Memory that is taken, and costs, only where it is written.
template <typename T> class Pages {
public:
  explicit Pages(int64_t size, bool zeros = false)
      : data_(static_cast<T *>(zeros ? std::calloc(size, sizeof(T)) : std::malloc(size * sizeof(T)))) {
    if (!data_)
      throw std::bad_alloc();
  }
  T *get() const { return data_.get(); }

private:
  struct Free {
    void operator()(T *data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
};

// How deep a pass must lie below a peak to part two objects, in units of the distance; `squashed` heights are its logits.
struct Relief {
  double depth;
  bool squashed;

  double distance(float height) const {
    return squashed ? 1 / (1 + std::exp(-static_cast<double>(height))) : static_cast<double>(height);
  }

  // The least key of what a pass near a top may touch; a little less does no harm.
  int32_t limit(int32_t top) const {
    double lowest = distance(height_of(top)) - depth;
    if (squashed) {
      lowest = std::min(std::max(lowest, 0.0), 1.0);
      lowest = std::log(lowest / (1 - lowest));
    }
    lowest = std::isfinite(lowest) ? lowest - 1e-5 * std::fabs(lowest) : -INFINITY;
    return key_of(static_cast<float>(lowest));
  }
};

// Values of one kind in some planes, with any strides: 0 float32, 1 bfloat16, 2 bytes.
struct Planes {
  const void *data;
  int32_t kind;
  const int64_t *steps;
};

// Where a path of one block ends: the piece of voxels that come there.
struct Piece {
  int64_t place;  // of the highest neighbour of the end, in the volume with its rim; of itself at a maximum
  int64_t voxels;
  int32_t top;  // key there
};

// From a voxel near the top of a piece to a neighbour whose piece was not yet known.
struct Ascending {
  int64_t place;
  int32_t piece, key;
};

// By two numbers, neither of which is 0, the highest of the keys of passes between them.
class Passes {
public:
  void add(int64_t one, int64_t other, int32_t key) {
    const uint64_t pair = static_cast<uint64_t>(std::min(one, other)) << 32 | static_cast<uint64_t>(std::max(one, other));
    Known &slot = recent_[mixed(pair) >> (64 - SLOT_BITS)];
    if (slot.pair != pair) {
      put(slot);
      slot = {pair, key};
    }
    slot.key = std::max(slot.key, key);
  }

  template <typename Visit> void each(Visit visit) {
    for (Known &slot : recent_)
      put(slot);
    for (const auto &[pair, key] : highest_)
      visit(static_cast<int64_t>(pair >> 32), static_cast<int64_t>(pair & UINT32_MAX), key);
  }

private:
  // Most passes are between pairs that were met a moment ago.
  static constexpr int SLOT_BITS = 9;
  struct Known {
    uint64_t pair;
    int32_t key;
  };
  static size_t mixed(uint64_t pair) { return (pair ^ pair >> 29) * 0x9E3779B97F4A7C15; }
  struct Mixed {
    size_t operator()(uint64_t pair) const { return mixed(pair) >> 7; }
  };

  void put(Known &slot) {
    if (slot.pair) {
      int32_t &key = highest_.emplace(slot.pair, slot.key).first->second;
      key = std::max(key, slot.key);
    }
    slot.pair = 0;
  }

  std::array<Known, 1 << SLOT_BITS> recent_{};
  std::unordered_map<uint64_t, int32_t, Mixed> highest_;
};

struct Pass {
  double height;
  int64_t first, second;
};

int64_t root_of(std::vector<int64_t> &parent, int64_t one) {
  while (parent[one] != one)
    one = parent[one] = parent[parent[one]];
  return one;
}

class Landscape {
public:
  // As `stackseg_landscape`.
  Landscape(const int64_t *size, bool across, float threshold, Relief relief, int64_t block)
      : across_(across), threshold_(threshold), relief_(relief), depth_(size[across]), rows_(size[!across] + 2),
        width_(size[2] + 2), plane_(rows_ * width_), most_(std::min(std::max(block / plane_, int64_t(1)), depth_)),
        weights_{across ? 3 : 9, across ? 9 : 3}, keys_((most_ + 3) * plane_), scratch_(4 * plane_),
        foreground_((most_ + 3) * plane_), targets_((most_ + 3) * plane_), pieces_((depth_ + 2) * plane_, true),
        codes_(width_ - 2), found_{{-1, 0, BACKGROUND}} {
    // The plane below the volume, and the rims of the others: what they surround is written when it comes.
    std::fill_n(keys_.get(), plane_, BACKGROUND);
    for (int64_t z = 1; z < most_ + 3; ++z) {
      int32_t *const plane = keys_.get() + z * plane_;
      std::fill_n(plane, width_ + 1, BACKGROUND);
      for (int64_t y = 2; y < rows_; ++y)
        std::fill_n(plane + y * width_ - 1, 2, BACKGROUND);
      std::fill_n(plane + plane_ - width_ - 1, width_ + 1, BACKGROUND);
    }
    for (int64_t x = 0; x < width_ - 2; ++x)
      codes_[x] = static_cast<int32_t>((x + 1) % 3);
    for (int from = 0; from < CODES; ++from)
      for (int to = 0; to < CODES; ++to)
        steps_[from * CODES + to] =
            static_cast<int32_t>(step(from, to, weights_[0]) * plane_ + step(from, to, weights_[1]) * width_ + step(from, to, 1));
    int neighbour = 0;
    for (int64_t z = -1; z <= 1; ++z)
      for (int64_t y = -1; y <= 1; ++y)
        for (int64_t x = -1; x <= 1; ++x)
          if (z || y || x)
            offsets_[neighbour++] = z * plane_ + y * width_ + x;
  }

  // The next planes; the last of them waits for its upper neighbour.
  void add(const Planes &heights, const Planes &inside, int64_t planes) {
    for (int64_t low = 0; low < planes; low += most_) {
      const int64_t count = std::min(most_, planes - low);
      fill(heights, inside, low, count);
      int64_t length = waiting_ + count;
      // With the plane of background at the end, a small volume is done in one go.
      if (z_ + length - 2 == depth_)
        std::fill(keys_.get() + length * plane_, keys_.get() + (length + 1) * plane_, BACKGROUND), ++length;
      if (length > 2) {
        const int32_t first = static_cast<int32_t>(found_.size());
        search(climb(length, first), first);
        z_ += length - 2;
      }
      std::memmove(keys_.get(), keys_.get() + (length - 2) * plane_, 2 * plane_ * sizeof(int32_t));
      waiting_ = 2;
    }
  }

  // Joins pieces to basins and basins to objects, and drops the unwanted; gives the number of those that are left.
  int64_t join(int64_t least, bool whole) {
    const int64_t basins = number_basins();
    const std::vector<int64_t> object = merge(basins);
    std::vector<int64_t> voxels(basins, 0);
    for (size_t piece = 1; piece < found_.size(); ++piece)
      voxels[object[basin_of_[piece]]] += found_[piece].voxels;
    std::vector<char> kept(basins);
    for (int64_t basin = 0; basin < basins; ++basin)
      kept[basin] = voxels[basin] >= std::max(least, int64_t(1));
    if (whole)
      at_faces([&](int64_t piece) { kept[object[basin_of_[piece]]] = false; });
    std::vector<int32_t> numbers(basins, 0);
    int32_t count = 0;
    for (int64_t basin = 0; basin < basins; ++basin)
      if (kept[basin])
        numbers[basin] = ++count;
    number_of_.assign(found_.size(), 0);
    for (size_t piece = 1; piece < found_.size(); ++piece)
      number_of_[piece] = numbers[object[basin_of_[piece]]];
    return count;
  }

  // After `join`, into [Z, Y, X].
  template <typename Label> void label(Label *labels) const {
    const int64_t z_step = across_ ? width_ : plane_, y_step = across_ ? plane_ : width_;
    const int64_t z_size = across_ ? rows_ - 2 : depth_, y_size = across_ ? depth_ : rows_ - 2;
    for (int64_t z = 0; z < z_size; ++z)
      for (int64_t y = 0; y < y_size; ++y) {
        const int32_t *const from = pieces_.get() + (z + 1) * z_step + (y + 1) * y_step + 1;
        for (int64_t x = 0; x < width_ - 2; ++x)
          *labels++ = static_cast<Label>(number_of_[from[x]]);
      }
  }

private:
  // Along one axis, from the place modulo 3 of one voxel to that of its neighbour.
  static int64_t step(int from, int to, int64_t weight) { return (to / weight % 3 - from / weight % 3 + 4) % 3 - 1; }

  void fill(const Planes &heights, const Planes &inside, int64_t low, int64_t count) {
    switch (heights.kind) {
    case 0:
      return fill_from(static_cast<const float *>(heights.data), heights.steps, inside, low, count);
    default:
      return fill_from(static_cast<const BFloat16 *>(heights.data), heights.steps, inside, low, count);
    }
  }

  template <typename Height>
  void fill_from(const Height *heights, const int64_t *steps, const Planes &inside, int64_t low, int64_t count) {
    switch (inside.kind) {
    case 0:
      return fill_planes(heights, steps, static_cast<const float *>(inside.data), inside.steps, low, count);
    case 1:
      return fill_planes(heights, steps, static_cast<const BFloat16 *>(inside.data), inside.steps, low, count);
    default:
      return fill_planes(heights, steps, static_cast<const uint8_t *>(inside.data), inside.steps, low, count);
    }
  }

  // Writes the keys of planes that come next into the inside of their rims.
  template <typename Height, typename Inside>
  void fill_planes(const Height *heights, const int64_t *by, const Inside *inside, const int64_t *in_by, int64_t low,
                   int64_t count) {
    const bool dense = by[2] == 1 && in_by[2] == 1;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t y = 0; y < rows_ - 2; ++y) {
        const Height *const from = heights + (low + i) * by[0] + y * by[1];
        const Inside *const mask = inside + (low + i) * in_by[0] + y * in_by[1];
        const int64_t z = z_ - 1 + waiting_ + i;
        const int32_t level = static_cast<int32_t>(weights_[0] * (z % 3) + weights_[1] * ((y + 1) % 3));
        int32_t *const out = keys_.get() + (waiting_ + i) * plane_ + (y + 1) * width_ + 1;
        if (dense)
          fill_line(from, 1, mask, 1, level, out);
        else
          fill_line(from, by[2], mask, in_by[2], level, out);
      }
  }

  template <typename Height, typename Inside>
  void fill_line(const Height *heights, int64_t step, const Inside *inside, int64_t in_step, int32_t level,
                 int32_t *out) const {
    const int32_t *const codes = codes_.data();
    for (int64_t x = 0; x < width_ - 2; ++x) {
      const int32_t key = key_of(widened(heights[x * step])) + level + codes[x];
      out[x] = is_above(inside[x * in_step], threshold_) ? key : BACKGROUND;
    }
  }

  // Finds out for every voxel of the foreground which piece it belongs to; gives how many there are. Where a path ends a
  // piece begins: they are numbered from `first` in the order of these places.
  int64_t climb(int64_t planes, int32_t first) {
    const int32_t *const keys = keys_.get();
    int32_t *const pieces = pieces_.get() + (z_ - 1) * plane_, *const scratch = scratch_.get();
    int32_t *const along_x = scratch + 3 * plane_, *const foreground = foreground_.get(), *const targets = targets_.get();
    const int64_t last = (planes - 1) * plane_;
    widen(keys, plane_, width_, along_x, scratch);
    widen(keys + plane_, plane_, width_, along_x, scratch + plane_);
    int64_t ends = 0, count = 0;
    for (int64_t z = 1; z < planes - 1; ++z) {
      widen(keys + (z + 1) * plane_, plane_, width_, along_x, scratch + (z + 1) % 3 * plane_);
      const int64_t before = count;
      count = list_foreground(keys, z * plane_, (z + 1) * plane_, foreground, count);
      for (int64_t n = before; n < count; ++n) {
        const int32_t place = foreground[n];
        const int32_t *const here = scratch + (place - z * plane_);
        const int32_t top = highest_of(here[0], here[plane_], here[2 * plane_]);
        const int32_t target = place + steps_[(keys[place] & PLACE_BITS) << 5 | (top & PLACE_BITS)];
        if (target == place || target < plane_ || target >= last) {
          pieces[place] = static_cast<int32_t>(first + ends);
          targets[ends++] = target;
        } else {
          // What lies behind may know its piece already; what lies ahead is still zero.
          pieces[place] = pieces[target] > 0 ? pieces[target] : ~target;
        }
      }
    }
    for (int64_t end = 0; end < ends; ++end)
      found_.push_back({(z_ - 1) * plane_ + targets[end], 0, keys[targets[end]]});
    settle(pieces, count, first);
    return count;
  }

  // Follows every path to its end. What lies ahead of a voxel comes first, and then knows its piece.
  void settle(int32_t *pieces, int64_t count, int32_t first) {
    const int32_t *const foreground = foreground_.get();
    int32_t counted = first;
    int64_t run = count;
    for (int64_t n = count - 1; n >= 0; --n) {
      const int32_t here = foreground[n], known = pieces[here];
      // Most are there after one step or none, which of the two nobody could guess.
      int32_t piece = pieces[known < 0 ? ~known : here];
      if (piece < 0)
        piece = follow(pieces, here);
      pieces[here] = piece;
      // Counted in runs: one number that is raised voxel by voxel would be waited for.
      if (piece != counted) {
        found_[counted].voxels += run - n - 1;
        counted = piece, run = n + 1;
      }
    }
    if (count)
      found_[counted].voxels += run;
  }

  // The piece at the end of a path. Every voxel on the way is visited once more, and from then on is an end for others.
  static int32_t follow(int32_t *pieces, int32_t here) {
    int32_t end = here;
    while (pieces[end] < 0)
      end = ~pieces[end];
    const int32_t piece = pieces[end];
    while (here != end) {
      const int32_t next = ~pieces[here];
      pieces[here] = piece;
      here = next;
    }
    return piece;
  }

  // Finds the ways between voxels near the tops of the block's pieces and neighbours that belong to other pieces.
  void search(int64_t count, int32_t first) {
    const int64_t low = (z_ - 1) * plane_;
    const int32_t *const keys = keys_.get(), *const pieces = pieces_.get() + low, *const foreground = foreground_.get();
    limits_.clear();
    for (size_t piece = first; piece < found_.size(); ++piece)
      limits_.push_back(relief_.limit(found_[piece].top));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t voxel = foreground[i];
      const int32_t piece = pieces[voxel], key = keys[voxel], limit = limits_[piece - first];
      if (key < limit)
        continue;
      for (const int64_t offset : offsets_) {
        const int64_t neighbour = voxel + offset;
        const int32_t other = pieces[neighbour], height = keys[neighbour];
        if (other == piece || height < limit)
          continue;
        if (other)
          passes_.add(piece, other, std::min(key, height));
        else
          ascending_.push_back({low + neighbour, piece, std::min(key, height)});
      }
    }
  }

  // Which basin every piece belongs to; gives the number of basins, which are in the order of the places of their maxima.
  int64_t number_basins() {
    const int64_t count = static_cast<int64_t>(found_.size());
    // Paths that went up could not know the piece above.
    std::vector<int64_t> link(count);
    std::vector<int64_t> maxima;
    for (int64_t piece = 1; piece < count; ++piece)
      if ((link[piece] = pieces_.get()[found_[piece].place]) == piece)
        maxima.push_back(piece);
    std::sort(maxima.begin(), maxima.end(),
              [this](int64_t one, int64_t other) { return order(found_[one].place) < order(found_[other].place); });
    basin_of_.assign(count, -1);
    peaks_.clear();
    for (size_t basin = 0; basin < maxima.size(); ++basin) {
      basin_of_[maxima[basin]] = static_cast<int64_t>(basin);
      peaks_.push_back(relief_.distance(height_of(found_[maxima[basin]].top)));
    }
    for (int64_t piece = 1; piece < count; ++piece)
      basin_of_[piece] = basin_of_[root_of(link, piece)];
    return static_cast<int64_t>(maxima.size());
  }

  // In the order in which voxels are in the volume, by their places with the rim.
  int64_t order(int64_t place) const {
    if (!across_)
      return place;
    const int64_t plane = place / plane_, row = place % plane_ / width_, x = place % width_;
    return (row * (depth_ + 2) + plane) * width_ + x;
  }

  // The object of every basin, numbered from 0 in the order of the highest basins that objects have.
  std::vector<int64_t> merge(int64_t basins) {
    std::vector<int64_t> parent(basins);
    for (int64_t basin = 0; basin < basins; ++basin)
      parent[basin] = basin;
    for (const Pass &pass : shallow_passes()) {
      int64_t high = root_of(parent, pass.first), low = root_of(parent, pass.second);
      if (peaks_[high] < peaks_[low])
        std::swap(high, low);
      if (high != low && peaks_[low] - pass.height < relief_.depth)
        parent[low] = high;
    }
    std::vector<int64_t> object(basins);
    for (int64_t basin = 0; basin < basins; ++basin)
      object[basin] = root_of(parent, basin);
    return object;
  }

  // Between basins, the highest first; of those as high the one with the lower numbers.
  std::vector<Pass> shallow_passes() {
    Passes between;
    const auto note = [&](int64_t one, int64_t other, int32_t key) {
      if (basin_of_[one] != basin_of_[other])
        between.add(basin_of_[one] + 1, basin_of_[other] + 1, key);
    };
    passes_.each(note);
    for (const Ascending &way : ascending_)
      note(way.piece, pieces_.get()[way.place], way.key);
    std::vector<Pass> shallow;
    between.each([&](int64_t one_more, int64_t another, int32_t key) {
      const int64_t first = one_more - 1, second = another - 1;
      const double height = relief_.distance(height_of(key)), one = peaks_[first], other = peaks_[second];
      // What is not a number is not near anything.
      const bool comparable = !std::isnan(one) && !std::isnan(other);
      if (comparable && std::min(one, other) - height < relief_.depth)
        shallow.push_back({height, first, second});
    });
    std::sort(shallow.begin(), shallow.end(), [](const Pass &a, const Pass &b) {
      return a.height != b.height ? a.height > b.height : a.first != b.first ? a.first < b.first : a.second < b.second;
    });
    return shallow;
  }

  // Calls with every piece of a voxel in the first or last plane along an axis that has more than one.
  template <typename Visit> void at_faces(Visit visit) const {
    const std::array<int64_t, 3> edges = {depth_, rows_ - 2, width_ - 2}, by = {plane_, width_, 1};
    for (size_t axis = 0; axis < 3; ++axis) {
      const size_t one = (axis + 1) % 3, other = (axis + 2) % 3;
      for (const int64_t end : {int64_t(1), edges[axis]})
        for (int64_t i = 1; edges[axis] > 1 && i <= edges[one]; ++i)
          for (int64_t j = 1; j <= edges[other]; ++j)
            if (const int32_t piece = pieces_.get()[end * by[axis] + i * by[one] + j * by[other]])
              visit(piece);
    }
  }

  const bool across_;
  const float threshold_;
  const Relief relief_;
  const int64_t depth_, rows_, width_, plane_, most_;
  // What a place modulo 3 along planes and rows counts in a code.
  const std::array<int64_t, 2> weights_;
  Pages<int32_t> keys_, scratch_, foreground_, targets_, pieces_;
  std::vector<int32_t> codes_, limits_;
  // From a voxel of one code to its neighbour of another; and to each neighbour.
  std::array<int32_t, CODES * CODES> steps_;
  std::array<int64_t, NEIGHBOURS> offsets_;
  // The first plane of the next block, counted with the rim, and how many planes of it are there: the one below it,
  // and then the one that waits for its upper neighbour.
  int64_t z_ = 1, waiting_ = 1;
  // By number; 0 is the background.
  std::vector<Piece> found_;
  Passes passes_;
  std::deque<Ascending> ascending_;
  std::vector<int64_t> basin_of_;
  std::vector<double> peaks_;
  std::vector<int32_t> number_of_;
};

} // namespace

extern "C" {

// A landscape without planes so far; null where there is no memory.
//
// size       of the volume, [Z, Y, X]
// across     planes come along y, each with all of z, instead of along z
// threshold  above which a voxel is inside
// depth      what a pass must be below a peak to part objects
// squashed   heights are logits of the distance in which that is
// block      voxels that are worked on together
void *stackseg_landscape(const int64_t *size, int32_t across, float threshold, double depth, int32_t squashed,
                         int64_t block) {
  try {
    return new Landscape(size, across, threshold, {depth, squashed != 0}, block);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

void stackseg_forget(void *landscape) { delete static_cast<Landscape *>(landscape); }

// Takes in the next planes; gives 0, or -1 where there is no memory.
//
// heights  float32 or bfloat16 by `kind`, as `Planes` has it; `steps` between its elements along plane, row and column
// inside   the same of what decides whether a voxel is inside, which may be bytes
int32_t stackseg_planes(void *landscape, const void *heights, int32_t kind, const int64_t *steps, const void *inside,
                        int32_t inside_kind, const int64_t *inside_steps, int64_t planes) {
  try {
    static_cast<Landscape *>(landscape)->add({heights, kind, steps}, {inside, inside_kind, inside_steps}, planes);
    return 0;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// Once every plane was added: gives the number of objects, or -1 where there is no memory. Their labels, [Z, Y, X], are
// written where 16 bits hold them.
//
// least   voxels that an object must have
// whole   and it must not touch a face of the volume
int64_t stackseg_objects(void *landscape, int64_t least, int32_t whole, uint16_t *labels) {
  try {
    Landscape &known = *static_cast<Landscape *>(landscape);
    const int64_t count = known.join(least, whole);
    if (count <= UINT16_MAX)
      known.label(labels);
    return count;
  } catch (const std::bad_alloc &) {
    return -1;
  }
}

// After `stackseg_objects`, in 32 bits.
void stackseg_labels(const void *landscape, uint32_t *labels) { static_cast<const Landscape *>(landscape)->label(labels); }
}
