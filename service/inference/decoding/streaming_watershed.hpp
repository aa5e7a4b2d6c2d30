// Watershed of a height map that arrives in planes. `watershed.py` and `instances.py` compute the same with torch and
// NumPy.
//
// A block consists of consecutive planes, each with a rim of background, in contiguous memory, so that the 26 neighbors of
// a voxel are at fixed offsets. The first and the last plane of a block only serve as neighbors. While a block is being
// processed, a negative number in `pieces` is the complement of the position of the voxel's highest neighbor in the block.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "height_keys.hpp"
#include "passes.hpp"

namespace {

// Number of passes above which unneeded passes are pruned. Each takes 16 bytes.
constexpr size_t MANY_PASSES = size_t(1) << 16;

class StreamingWatershed {
public:
  // Arguments as for `stackseg_watershed`.
  StreamingWatershed(const int64_t *size, bool along_y, float threshold, Persistence persistence, int64_t block)
      : along_y_(along_y), threshold_(threshold), persistence_(persistence), depth_(size[along_y]), rows_(size[!along_y] + 2),
        width_(size[2] + 2), plane_(rows_ * width_), block_planes_(std::min(std::max(block / plane_, int64_t(1)), depth_)),
        weights_{along_y ? 3 : 9, along_y ? 9 : 3}, keys_((block_planes_ + 3) * plane_), scratch_(4 * plane_),
        foreground_((block_planes_ + 3) * plane_), targets_((block_planes_ + 3) * plane_), pieces_((depth_ + 2) * plane_, true),
        scores_((block_planes_ + 3) * plane_), codes_(width_ - 2), limits_{BACKGROUND}, piece_ends_{{-1, 0, BACKGROUND}} {
    // Fill the plane below the volume and the rims of all other planes. Their insides are written when the planes arrive.
    std::fill_n(keys_.get(), plane_, BACKGROUND);
    for (int64_t z = 1; z < block_planes_ + 3; ++z) {
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

  // Adds the next planes. The last one is processed when its upper neighbor is known.
  void add(const Planes &heights, const Planes &inside, int64_t planes) {
    for (int64_t low = 0; low < planes; low += block_planes_) {
      const int64_t count = std::min(block_planes_, planes - low);
      fill(heights, inside, low, count);
      int64_t length = pending_planes_ + count;
      // Append the final plane of background here, so that a small volume is processed in one pass.
      if (z_ + length - 2 == depth_)
        std::fill(keys_.get() + length * plane_, keys_.get() + (length + 1) * plane_, BACKGROUND), ++length;
      if (length > 2) {
        const int32_t first = static_cast<int32_t>(piece_ends_.size());
        const int64_t count = trace_paths(length, first);
        note_pending_passes();
        find_passes(count);
        forget_passes();
        z_ += length - 2;
      }
      std::memmove(keys_.get(), keys_.get() + (length - 2) * plane_, 2 * plane_ * sizeof(int32_t));
      std::memmove(scores_.get(), scores_.get() + (length - 2) * plane_, 2 * plane_);
      pending_planes_ = 2;
    }
  }

  // Merges pieces into basins and basins into objects, and drops unwanted objects. Returns the number of objects.
  int64_t join(int64_t least, bool drop_border) {
    const int64_t basins = number_basins();
    const std::vector<int64_t> object = merge(basins);
    std::vector<int64_t> voxels(basins, 0), foreground(basins, 0);
    for (size_t piece = 1; piece < piece_ends_.size(); ++piece) {
      voxels[object[basin_of_[piece]]] += piece_ends_[piece].voxels;
      foreground[object[basin_of_[piece]]] += piece_ends_[piece].foreground;
    }
    std::vector<char> kept(basins);
    for (int64_t basin = 0; basin < basins; ++basin)
      kept[basin] = voxels[basin] >= std::max(least, int64_t(1));
    if (drop_border)
      visit_faces([&](int64_t piece) { kept[object[basin_of_[piece]]] = false; });
    std::vector<int32_t> numbers(basins, 0);
    int32_t count = 0;
    facts_.clear();
    for (int64_t basin = 0; basin < basins; ++basin)
      if (kept[basin]) {
        numbers[basin] = ++count;
        facts_.push_back({static_cast<double>(voxels[basin]), foreground[basin] / PROBABILITY_ONE, peaks_[basin]});
      }
    number_of_.assign(piece_ends_.size(), 0);
    for (size_t piece = 1; piece < piece_ends_.size(); ++piece)
      number_of_[piece] = numbers[object[basin_of_[piece]]];
    return count;
  }

  // Returns for every object, after `join`: the number of voxels, the sum of their probabilities, the distance at the peak.
  const std::vector<std::array<double, 3>> &facts() const { return facts_; }

  // Replaces the number of each object, after `join`, by its entry in `numbers` [objects + 1]. Number 0 is the background.
  void renumber(const int32_t *numbers) {
    for (int32_t &number : number_of_)
      number = numbers[number];
  }

  // Writes the labels [Z, Y, X], after `join`.
  template <typename Label> void label(Label *labels) const {
    const int64_t z_step = along_y_ ? width_ : plane_, y_step = along_y_ ? plane_ : width_;
    const int64_t z_size = along_y_ ? rows_ - 2 : depth_, y_size = along_y_ ? depth_ : rows_ - 2;
    for (int64_t z = 0; z < z_size; ++z)
      for (int64_t y = 0; y < y_size; ++y) {
        const int32_t *const from = pieces_.get() + (z + 1) * z_step + (y + 1) * y_step + 1;
        for (int64_t x = 0; x < width_ - 2; ++x)
          *labels++ = static_cast<Label>(number_of_[from[x]]);
      }
  }

private:
  // Step along one axis from a voxel to its neighbor, computed from their positions modulo 3.
  static int64_t step(int from, int to, int64_t weight) { return (to / weight % 3 - from / weight % 3 + 4) % 3 - 1; }

  void fill(const Planes &heights, const Planes &inside, int64_t low, int64_t count) {
    if (heights.kind)
      fill_from(static_cast<const Bfloat16 *>(heights.data), heights.steps, inside, low, count);
    else
      fill_from(static_cast<const float *>(heights.data), heights.steps, inside, low, count);
  }

  template <typename Height>
  void fill_from(const Height *heights, const int64_t *steps, const Planes &inside, int64_t low, int64_t count) {
    if (inside.kind == 0)
      fill_planes(heights, steps, static_cast<const float *>(inside.data), inside.steps, low, count);
    else if (inside.kind == 1)
      fill_planes(heights, steps, static_cast<const Bfloat16 *>(inside.data), inside.steps, low, count);
    else
      fill_planes(heights, steps, static_cast<const uint8_t *>(inside.data), inside.steps, low, count);
  }

  // Writes the keys of the next planes inside their rims.
  template <typename Height, typename Inside>
  void fill_planes(const Height *heights, const int64_t *by, const Inside *inside, const int64_t *in_by, int64_t low,
                   int64_t count) {
    const bool dense = by[2] == 1 && in_by[2] == 1;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t y = 0; y < rows_ - 2; ++y) {
        const Height *const from = heights + (low + i) * by[0] + y * by[1];
        const Inside *const mask = inside + (low + i) * in_by[0] + y * in_by[1];
        const int64_t z = z_ - 1 + pending_planes_ + i;
        const int32_t level = static_cast<int32_t>(weights_[0] * (z % 3) + weights_[1] * ((y + 1) % 3));
        const int64_t place = (pending_planes_ + i) * plane_ + (y + 1) * width_ + 1;
        if (dense)
          fill_line(from, 1, mask, 1, level, keys_.get() + place, scores_.get() + place);
        else
          fill_line(from, by[2], mask, in_by[2], level, keys_.get() + place, scores_.get() + place);
      }
  }

  template <typename Height, typename Inside>
  void fill_line(const Height *heights, int64_t step, const Inside *inside, int64_t in_step, int32_t level, int32_t *out,
                 uint8_t *__restrict scores) const {
    const int32_t *const codes = codes_.data();
    for (int64_t x = 0; x < width_ - 2; ++x) {
      const int32_t key = key_of(load_one(heights + x * step)) + level + codes[x];
      out[x] = is_above(inside + x * in_step, threshold_) ? key : BACKGROUND;
    }
    for (int64_t x = 0; x < width_ - 2; ++x)
      scores[x] = code_of(inside + x * in_step);
  }

  // Finds the piece of every foreground voxel, and returns the number of these voxels. A new piece is created where a path
  // ends or leaves the block upwards. New pieces are numbered from `first` in the order of these voxels.
  int64_t trace_paths(int64_t planes, int32_t first) {
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
        if (target < plane_) {
          pieces[place] = pieces[target];
        } else if (target == place || target >= last) {
          pieces[place] = static_cast<int32_t>(first + ends);
          targets[ends++] = target;
        } else {
          // The piece of a voxel earlier in the scan may be known already. For voxels later in the scan it is still zero.
          pieces[place] = pieces[target] > 0 ? pieces[target] : ~target;
        }
      }
    }
    for (int64_t end = 0; end < ends; ++end) {
      piece_ends_.push_back({(z_ - 1) * plane_ + targets[end], 0, keys[targets[end]]});
      limits_.push_back(persistence_.limit(keys[targets[end]]));
    }
    settle(pieces, count);
    return count;
  }

  // Follows every path to its end. Voxels are visited in reverse order, so paths that lead forward meet known pieces.
  void settle(int32_t *pieces, int64_t count) {
    const int32_t *const foreground = foreground_.get();
    const std::array<int32_t, 256> &probability = probabilities();
    const uint8_t *const scores = scores_.get();
    int32_t counted = 0;
    int64_t run = count, sum = 0;
    for (int64_t n = count - 1; n >= 0; --n) {
      const int32_t here = foreground[n], known = pieces[here];
      // Most paths end after zero or one step. A branch between these two would be unpredictable.
      int32_t piece = pieces[known < 0 ? ~known : here];
      if (piece < 0)
        piece = follow(pieces, here);
      pieces[here] = piece;
      // Count voxels in runs, because incrementing one number for every voxel would stall.
      if (piece != counted) {
        piece_ends_[counted].voxels += static_cast<int32_t>(run - n - 1);
        piece_ends_[counted].foreground += sum;
        counted = piece, run = n + 1, sum = 0;
      }
      sum += probability[scores[here]];
    }
    if (count) {
      piece_ends_[counted].voxels += static_cast<int32_t>(run);
      piece_ends_[counted].foreground += sum;
    }
  }

  // Returns the piece at the end of a path, and stores it in every voxel on the path, so that other paths can end there.
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

  // Finds the passes from voxels near the tops of the block's pieces to neighbors in other pieces.
  void find_passes(int64_t count) {
    const int64_t low = (z_ - 1) * plane_;
    const int32_t *const keys = keys_.get(), *const pieces = pieces_.get() + low, *const foreground = foreground_.get();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t voxel = foreground[i];
      const int32_t piece = pieces[voxel], key = keys[voxel], limit = limits_[piece];
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
          pending_passes_.push_back({low + neighbour, piece, std::min(key, height)});
      }
    }
  }

  // Adds the passes to neighbors beyond the previous block, whose pieces are known now.
  void note_pending_passes() {
    for (const PendingPass &way : pending_passes_)
      if (const int32_t other = pieces_.get()[way.place]; other != way.piece)
        passes_.add(way.piece, other, way.key);
    pending_passes_.clear();
  }

  // Prunes the passes if there are many. In dense stacks without clear peaks, they would take many times the memory of the
  // stack.
  void forget_passes() {
    if (passes_.size() < most_passes_)
      return;
    const auto distance = [this](int32_t key) { return persistence_.distance(height_of(key)); };
    passes_.prune(piece_ends_.size(), [this](int64_t piece) { return piece_above(piece); }, distance);
    most_passes_ = std::max(MANY_PASSES, 2 * passes_.size());
  }

  // Returns the last piece known so far to which the path of a piece leads.
  int64_t piece_above(int64_t piece) {
    int64_t last = piece;
    while (const int64_t next = pieces_.get()[piece_ends_[last].place]) {
      if (next == last)
        break;
      last = next;
    }
    return last;
  }

  // Assigns a basin to every piece, and returns the number of basins. Basins are ordered by the positions of their maxima.
  int64_t number_basins() {
    const int64_t count = static_cast<int64_t>(piece_ends_.size());
    // When a path left its block upwards, the piece above was not known yet.
    std::vector<int64_t> link(count);
    std::vector<int64_t> maxima;
    for (int64_t piece = 1; piece < count; ++piece)
      if ((link[piece] = pieces_.get()[piece_ends_[piece].place]) == piece)
        maxima.push_back(piece);
    std::sort(maxima.begin(), maxima.end(),
              [this](int64_t one, int64_t other) { return order(piece_ends_[one].place) < order(piece_ends_[other].place); });
    basin_of_.assign(count, -1);
    peaks_.clear();
    for (size_t basin = 0; basin < maxima.size(); ++basin) {
      basin_of_[maxima[basin]] = static_cast<int64_t>(basin);
      peaks_.push_back(persistence_.distance(height_of(piece_ends_[maxima[basin]].top)));
    }
    for (int64_t piece = 1; piece < count; ++piece)
      basin_of_[piece] = basin_of_[root_of(link, piece)];
    return static_cast<int64_t>(maxima.size());
  }

  // Maps a position in the volume with its rim to its rank in the order [Z, Y, X].
  int64_t order(int64_t place) const {
    if (!along_y_)
      return place;
    const int64_t plane = place / plane_, row = place % plane_ / width_, x = place % width_;
    return (row * (depth_ + 2) + plane) * width_ + x;
  }

  // Returns the object of every basin. An object has the number of its highest basin.
  std::vector<int64_t> merge(int64_t basins) {
    std::vector<int64_t> parent(basins);
    std::iota(parent.begin(), parent.end(), 0);
    for (const Pass &pass : shallow_passes()) {
      int64_t high = root_of(parent, pass.first), low = root_of(parent, pass.second);
      if (peaks_[high] < peaks_[low])
        std::swap(high, low);
      if (high != low && peaks_[low] - pass.height < persistence_.depth)
        parent[low] = high;
    }
    for (int64_t basin = 0; basin < basins; ++basin)
      parent[basin] = root_of(parent, basin);
    return parent;
  }

  // Returns the passes between basins that may merge them, the highest first, and for equal heights those with lower basin
  // numbers first. Two basins may have several passes.
  std::vector<Pass> shallow_passes() {
    std::vector<Pass> shallow;
    passes_.visit_all([&](int64_t one_piece, int64_t other_piece, int32_t key) {
      const int64_t first = basin_of_[one_piece], second = basin_of_[other_piece];
      const double height = persistence_.distance(height_of(key)), one = peaks_[first], other = peaks_[second];
      // A peak that is NaN is never merged.
      const bool comparable = !std::isnan(one) && !std::isnan(other);
      if (first != second && comparable && std::min(one, other) - height < persistence_.depth)
        shallow.push_back({height, std::min(first, second), std::max(first, second)});
    });
    std::sort(shallow.begin(), shallow.end(), [](const Pass &a, const Pass &b) {
      return a.height != b.height ? a.height > b.height : a.first != b.first ? a.first < b.first : a.second < b.second;
    });
    return shallow;
  }

  // Calls `visit` with the piece of every foreground voxel on a face of the volume, except along axes of size 1.
  template <typename Visit> void visit_faces(Visit visit) const {
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

  const bool along_y_;
  const float threshold_;
  const Persistence persistence_;
  const int64_t depth_, rows_, width_, plane_, block_planes_;
  // Weights in a position code of the positions modulo 3 along planes and rows.
  const std::array<int64_t, 2> weights_;
  Pages<int32_t> keys_, scratch_, foreground_, targets_, pieces_;
  // Foreground scores, quantized by `code_of`.
  Pages<uint8_t> scores_;
  std::vector<int32_t> codes_;
  // Offsets from a voxel to its neighbor by their position codes, and offsets to all neighbors.
  std::array<int32_t, CODES * CODES> steps_;
  std::array<int64_t, NEIGHBOURS> offsets_;
  // The first plane of the next block, counted with the rim, and the number of its planes that are present: the plane below
  // it, and later also the plane that waits for its upper neighbor.
  int64_t z_ = 1, pending_planes_ = 1;
  // Data of the pieces by number, where 0 is the background. `limits_` are keys below which passes are irrelevant.
  std::vector<int32_t> limits_;
  std::vector<Piece> piece_ends_;
  Passes passes_;
  std::vector<PendingPass> pending_passes_;
  size_t most_passes_ = MANY_PASSES;
  std::vector<int64_t> basin_of_;
  std::vector<double> peaks_;
  std::vector<int32_t> number_of_;
  std::vector<std::array<double, 3>> facts_;
};

} // namespace
