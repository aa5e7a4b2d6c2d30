// Watershed of a height map that arrives plane by plane. `watershed.py` and `labels.py` contain the equivalent PyTorch code.
//
// A block consists of consecutive planes in flat memory. Each plane is padded with background, so the 26 neighbors of a voxel
// are at fixed distances. The first and the last plane of a block serve only as neighbors. While a block is processed, a
// negative number in `pieces` is the complement of the position of the voxel's highest neighbor in the block.

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

// Minimum number of passes at which redundant passes are removed. Each pass uses 16 bytes.
constexpr size_t MIN_PASSES_TO_PRUNE = size_t(1) << 16;

class StreamingWatershed {
public:
  // See `stackseg_watershed` for the arguments.
  StreamingWatershed(const int64_t *size, bool along_y, float threshold, Persistence persistence, int64_t block_voxels)
      : along_y_(along_y), threshold_(threshold), persistence_(persistence), depth_(size[along_y]), rows_(size[!along_y] + 2),
        width_(size[2] + 2), plane_(rows_ * width_), block_planes_(std::min(std::max(block_voxels / plane_, int64_t(1)), depth_)),
        weights_{along_y ? 3 : 9, along_y ? 9 : 3}, keys_((block_planes_ + 3) * plane_), scratch_(4 * plane_),
        positions_((block_planes_ + 3) * plane_), targets_((block_planes_ + 3) * plane_), pieces_((depth_ + 2) * plane_, true),
        scores_((block_planes_ + 3) * plane_), codes_(width_ - 2), limits_{BACKGROUND_KEY}, piece_ends_{{-1, 0, BACKGROUND_KEY}} {
    // Fill the plane below the volume and the padding of the other planes. Their inner voxels are written by `add`.
    std::fill_n(keys_.get(), plane_, BACKGROUND_KEY);
    for (int64_t z = 1; z < block_planes_ + 3; ++z) {
      int32_t *const plane = keys_.get() + z * plane_;
      std::fill_n(plane, width_ + 1, BACKGROUND_KEY);
      for (int64_t y = 2; y < rows_; ++y)
        std::fill_n(plane + y * width_ - 1, 2, BACKGROUND_KEY);
      std::fill_n(plane + plane_ - width_ - 1, width_ + 1, BACKGROUND_KEY);
    }
    for (int64_t x = 0; x < width_ - 2; ++x)
      codes_[x] = static_cast<int32_t>((x + 1) % 3);
    for (int from = 0; from < NUM_CODES; ++from)
      for (int to = 0; to < NUM_CODES; ++to)
        steps_[from * NUM_CODES + to] =
            static_cast<int32_t>(step(from, to, weights_[0]) * plane_ + step(from, to, weights_[1]) * width_ + step(from, to, 1));
    int neighbor = 0;
    for (int64_t z = -1; z <= 1; ++z)
      for (int64_t y = -1; y <= 1; ++y)
        for (int64_t x = -1; x <= 1; ++x)
          if (z || y || x)
            offsets_[neighbor++] = z * plane_ + y * width_ + x;
  }

  // Adds the next planes. The last plane is processed once the plane above it arrives.
  void add(const Planes &heights, const Planes &foreground, int64_t planes) {
    for (int64_t low = 0; low < planes; low += block_planes_) {
      const int64_t count = std::min(block_planes_, planes - low);
      fill(heights, foreground, low, count);
      int64_t length = pending_planes_ + count;
      // The last block includes the background plane at the end, so that a small volume needs only one block.
      if (z_ + length - 2 == depth_)
        std::fill(keys_.get() + length * plane_, keys_.get() + (length + 1) * plane_, BACKGROUND_KEY), ++length;
      if (length > 2) {
        const int32_t first = static_cast<int32_t>(piece_ends_.size());
        const int64_t count = trace_paths(length, first);
        add_pending_passes();
        find_passes(count);
        prune_passes();
        z_ += length - 2;
      }
      std::memmove(keys_.get(), keys_.get() + (length - 2) * plane_, 2 * plane_ * sizeof(int32_t));
      std::memmove(scores_.get(), scores_.get() + (length - 2) * plane_, 2 * plane_);
      pending_planes_ = 2;
    }
  }

  // Joins pieces to basins and basins to objects, and filters the objects; returns the number of remaining objects.
  int64_t join(int64_t min_voxels, bool drop_border) {
    const int64_t basins = number_basins();
    const std::vector<int64_t> object = merge(basins);
    std::vector<int64_t> voxels(basins, 0), foreground(basins, 0);
    for (size_t piece = 1; piece < piece_ends_.size(); ++piece) {
      voxels[object[basin_of_[piece]]] += piece_ends_[piece].voxels;
      foreground[object[basin_of_[piece]]] += piece_ends_[piece].foreground;
    }
    std::vector<char> is_kept(basins);
    for (int64_t basin = 0; basin < basins; ++basin)
      is_kept[basin] = voxels[basin] >= std::max(min_voxels, int64_t(1));
    if (drop_border)
      visit_faces([&](int64_t piece) { is_kept[object[basin_of_[piece]]] = false; });
    std::vector<int32_t> numbers(basins, 0);
    int32_t count = 0;
    object_properties_.clear();
    for (int64_t basin = 0; basin < basins; ++basin)
      if (is_kept[basin]) {
        numbers[basin] = ++count;
        object_properties_.push_back({static_cast<double>(voxels[basin]), foreground[basin] / PROBABILITY_ONE, peaks_[basin]});
      }
    label_of_.assign(piece_ends_.size(), 0);
    for (size_t piece = 1; piece < piece_ends_.size(); ++piece)
      label_of_[piece] = numbers[object[basin_of_[piece]]];
    return count;
  }

  // Returns, after `join`, for every object: number of voxels, sum of their probabilities, distance at the peak.
  const std::vector<std::array<double, 3>> &object_properties() const { return object_properties_; }

  // After `join`, replaces the number of each object by its entry in `numbers` [objects + 1]; 0 is the background.
  void renumber(const int32_t *numbers) {
    for (int32_t &label : label_of_)
      label = numbers[label];
  }

  // After `join`, writes the labels [Z, Y, X].
  template <typename Label> void label(Label *labels) const {
    const int64_t z_step = along_y_ ? width_ : plane_, y_step = along_y_ ? plane_ : width_;
    const int64_t z_size = along_y_ ? rows_ - 2 : depth_, y_size = along_y_ ? depth_ : rows_ - 2;
    for (int64_t z = 0; z < z_size; ++z)
      for (int64_t y = 0; y < y_size; ++y) {
        const int32_t *const from = pieces_.get() + (z + 1) * z_step + (y + 1) * y_step + 1;
        for (int64_t x = 0; x < width_ - 2; ++x)
          *labels++ = static_cast<Label>(label_of_[from[x]]);
      }
  }

private:
  // Returns the step along one axis from a voxel to its neighbor, given their position codes.
  static int64_t step(int from, int to, int64_t weight) { return (to / weight % 3 - from / weight % 3 + 4) % 3 - 1; }

  void fill(const Planes &heights, const Planes &foreground, int64_t low, int64_t count) {
    if (heights.kind)
      fill_from(static_cast<const Bfloat16 *>(heights.data), heights.strides, foreground, low, count);
    else
      fill_from(static_cast<const float *>(heights.data), heights.strides, foreground, low, count);
  }

  template <typename Height>
  void fill_from(const Height *heights, const int64_t *strides, const Planes &foreground, int64_t low, int64_t count) {
    if (foreground.kind == 0)
      fill_planes(heights, strides, static_cast<const float *>(foreground.data), foreground.strides, low, count);
    else if (foreground.kind == 1)
      fill_planes(heights, strides, static_cast<const Bfloat16 *>(foreground.data), foreground.strides, low, count);
    else
      fill_planes(heights, strides, static_cast<const uint8_t *>(foreground.data), foreground.strides, low, count);
  }

  // Writes the keys of the next planes inside their padding.
  template <typename Height, typename Foreground>
  void fill_planes(const Height *heights, const int64_t *strides, const Foreground *foreground,
                   const int64_t *foreground_strides, int64_t low, int64_t count) {
    const bool is_dense = strides[2] == 1 && foreground_strides[2] == 1;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t y = 0; y < rows_ - 2; ++y) {
        const Height *const from = heights + (low + i) * strides[0] + y * strides[1];
        const Foreground *const mask = foreground + (low + i) * foreground_strides[0] + y * foreground_strides[1];
        const int64_t z = z_ - 1 + pending_planes_ + i;
        const int32_t row_code = static_cast<int32_t>(weights_[0] * (z % 3) + weights_[1] * ((y + 1) % 3));
        const int64_t position = (pending_planes_ + i) * plane_ + (y + 1) * width_ + 1;
        if (is_dense)
          fill_line(from, 1, mask, 1, row_code, keys_.get() + position, scores_.get() + position);
        else
          fill_line(from, strides[2], mask, foreground_strides[2], row_code, keys_.get() + position, scores_.get() + position);
      }
  }

  template <typename Height, typename Foreground>
  void fill_line(const Height *heights, int64_t step, const Foreground *foreground, int64_t foreground_step, int32_t row_code,
                 int32_t *out, uint8_t *__restrict scores) const {
    const int32_t *const codes = codes_.data();
    for (int64_t x = 0; x < width_ - 2; ++x) {
      const int32_t key = key_of(load_one(heights + x * step)) + row_code + codes[x];
      out[x] = is_above(foreground + x * foreground_step, threshold_) ? key : BACKGROUND_KEY;
    }
    for (int64_t x = 0; x < width_ - 2; ++x)
      scores[x] = code_of(foreground + x * foreground_step);
  }

  // Determines the piece of every foreground voxel; returns the number of foreground voxels. There is a piece for each end
  // of a path and for each position where a path leaves the block upward, numbered from `first` in the order of positions.
  int64_t trace_paths(int64_t planes, int32_t first) {
    const int32_t *const keys = keys_.get();
    int32_t *const pieces = pieces_.get() + (z_ - 1) * plane_, *const scratch = scratch_.get();
    int32_t *const along_x = scratch + 3 * plane_, *const positions = positions_.get(), *const targets = targets_.get();
    const int64_t last = (planes - 1) * plane_;
    max_filter_plane(keys, plane_, width_, along_x, scratch);
    max_filter_plane(keys + plane_, plane_, width_, along_x, scratch + plane_);
    int64_t ends = 0, count = 0;
    for (int64_t z = 1; z < planes - 1; ++z) {
      max_filter_plane(keys + (z + 1) * plane_, plane_, width_, along_x, scratch + (z + 1) % 3 * plane_);
      const int64_t first_in_plane = count;
      count = list_foreground(keys, z * plane_, (z + 1) * plane_, positions, count);
      for (int64_t n = first_in_plane; n < count; ++n) {
        const int32_t position = positions[n];
        const int32_t *const maxima = scratch + (position - z * plane_);
        const int32_t highest = highest_of(maxima[0], maxima[plane_], maxima[2 * plane_]);
        const int32_t target = position + steps_[(keys[position] & POSITION_BITS) << 5 | (highest & POSITION_BITS)];
        if (target < plane_) {
          pieces[position] = pieces[target];
        } else if (target == position || target >= last) {
          pieces[position] = static_cast<int32_t>(first + ends);
          targets[ends++] = target;
        } else {
          // A target that has been visited may already have its piece; the piece of any other target is still zero.
          pieces[position] = pieces[target] > 0 ? pieces[target] : ~target;
        }
      }
    }
    for (int64_t end = 0; end < ends; ++end) {
      piece_ends_.push_back({(z_ - 1) * plane_ + targets[end], 0, keys[targets[end]]});
      limits_.push_back(persistence_.lowest_pass_key(keys[targets[end]]));
    }
    follow_paths(pieces, count);
    return count;
  }

  // Follows every path to its end. Voxels are visited in reverse order, so later voxels already have their piece.
  void follow_paths(int32_t *pieces, int64_t count) {
    const int32_t *const positions = positions_.get();
    const std::array<int32_t, 256> &probability = probabilities();
    const uint8_t *const scores = scores_.get();
    int32_t counted_piece = 0;
    int64_t run = count, sum = 0;
    for (int64_t n = count - 1; n >= 0; --n) {
      const int32_t voxel = positions[n], entry = pieces[voxel];
      // Most paths end after at most one step. A branch between the two cases would be mispredicted.
      int32_t piece = pieces[entry < 0 ? ~entry : voxel];
      if (piece < 0)
        piece = follow(pieces, voxel);
      pieces[voxel] = piece;
      // Count runs of voxels: incrementing one number for each voxel would stall the pipeline.
      if (piece != counted_piece) {
        piece_ends_[counted_piece].voxels += static_cast<int32_t>(run - n - 1);
        piece_ends_[counted_piece].foreground += sum;
        counted_piece = piece, run = n + 1, sum = 0;
      }
      sum += probability[scores[voxel]];
    }
    if (count) {
      piece_ends_[counted_piece].voxels += static_cast<int32_t>(run);
      piece_ends_[counted_piece].foreground += sum;
    }
  }

  // Returns the piece at the end of a path, and stores it for every voxel of the path.
  static int32_t follow(int32_t *pieces, int32_t voxel) {
    int32_t end = voxel;
    while (pieces[end] < 0)
      end = ~pieces[end];
    const int32_t piece = pieces[end];
    while (voxel != end) {
      const int32_t next = ~pieces[voxel];
      pieces[voxel] = piece;
      voxel = next;
    }
    return piece;
  }

  // Finds passes between voxels near the peaks of the block's pieces and neighbors that belong to other pieces.
  void find_passes(int64_t count) {
    const int64_t low = (z_ - 1) * plane_;
    const int32_t *const keys = keys_.get(), *const pieces = pieces_.get() + low, *const positions = positions_.get();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t voxel = positions[i];
      const int32_t piece = pieces[voxel], key = keys[voxel], limit = limits_[piece];
      if (key < limit)
        continue;
      for (const int64_t offset : offsets_) {
        const int64_t neighbor = voxel + offset;
        const int32_t other = pieces[neighbor], height = keys[neighbor];
        if (other == piece || height < limit)
          continue;
        if (other)
          passes_.add(piece, other, std::min(key, height));
        else
          pending_passes_.push_back({low + neighbor, piece, std::min(key, height)});
      }
    }
  }

  // Adds the passes to neighbors above the previous block, whose pieces are now known.
  void add_pending_passes() {
    for (const PendingPass &pending : pending_passes_)
      if (const int32_t other = pieces_.get()[pending.position]; other != pending.piece)
        passes_.add(pending.piece, other, pending.key);
    pending_passes_.clear();
  }

  // Removes redundant passes. In crowded stacks without clear peaks, they would need many times the memory of the stack.
  void prune_passes() {
    if (passes_.size() < prune_threshold_)
      return;
    const auto distance = [this](int32_t key) { return persistence_.distance(height_of(key)); };
    passes_.prune(piece_ends_.size(), [this](int64_t piece) { return piece_above(piece); }, distance);
    prune_threshold_ = std::max(MIN_PASSES_TO_PRUNE, 2 * passes_.size());
  }

  // Returns the last known piece that the path of a piece leads to.
  int64_t piece_above(int64_t piece) {
    int64_t last = piece;
    while (const int64_t next = pieces_.get()[piece_ends_[last].position]) {
      if (next == last)
        break;
      last = next;
    }
    return last;
  }

  // Determines the basin of every piece; returns the number of basins, ordered by the positions of their maxima.
  int64_t number_basins() {
    const int64_t count = static_cast<int64_t>(piece_ends_.size());
    // The pieces above a block were not known when its paths were traced.
    std::vector<int64_t> link(count);
    std::vector<int64_t> maxima;
    for (int64_t piece = 1; piece < count; ++piece)
      if ((link[piece] = pieces_.get()[piece_ends_[piece].position]) == piece)
        maxima.push_back(piece);
    std::sort(maxima.begin(), maxima.end(),
              [this](int64_t a, int64_t b) { return sort_key(piece_ends_[a].position) < sort_key(piece_ends_[b].position); });
    basin_of_.assign(count, -1);
    peaks_.clear();
    for (size_t basin = 0; basin < maxima.size(); ++basin) {
      basin_of_[maxima[basin]] = static_cast<int64_t>(basin);
      peaks_.push_back(persistence_.distance(height_of(piece_ends_[maxima[basin]].key)));
    }
    for (int64_t piece = 1; piece < count; ++piece)
      basin_of_[piece] = basin_of_[root_of(link, piece)];
    return static_cast<int64_t>(maxima.size());
  }

  // Returns a key that orders positions, which include the padding, like the voxels of the volume.
  int64_t sort_key(int64_t position) const {
    if (!along_y_)
      return position;
    const int64_t plane = position / plane_, row = position % plane_ / width_, x = position % width_;
    return (row * (depth_ + 2) + plane) * width_ + x;
  }

  // Returns the object of every basin: the number of its highest basin.
  std::vector<int64_t> merge(int64_t basins) {
    std::vector<int64_t> parent(basins);
    std::iota(parent.begin(), parent.end(), 0);
    for (const Pass &pass : find_shallow_passes()) {
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

  // Returns the shallow passes between basins by descending height, then by their numbers. A pair may occur several times.
  std::vector<Pass> find_shallow_passes() {
    std::vector<Pass> shallow;
    passes_.visit_all([&](int64_t piece_a, int64_t piece_b, int32_t key) {
      const int64_t first = basin_of_[piece_a], second = basin_of_[piece_b];
      const double height = persistence_.distance(height_of(key)), first_peak = peaks_[first], second_peak = peaks_[second];
      // A peak of NaN has no shallow passes.
      const bool is_comparable = !std::isnan(first_peak) && !std::isnan(second_peak);
      if (first != second && is_comparable && std::min(first_peak, second_peak) - height < persistence_.depth)
        shallow.push_back({height, std::min(first, second), std::max(first, second)});
    });
    std::sort(shallow.begin(), shallow.end(), [](const Pass &a, const Pass &b) {
      return a.height != b.height ? a.height > b.height : a.first != b.first ? a.first < b.first : a.second < b.second;
    });
    return shallow;
  }

  // Calls `visit` with the piece of every voxel in the first and last plane along each axis that is longer than one voxel.
  template <typename Visit> void visit_faces(Visit visit) const {
    const std::array<int64_t, 3> edges = {depth_, rows_ - 2, width_ - 2}, strides = {plane_, width_, 1};
    for (size_t axis = 0; axis < 3; ++axis) {
      const size_t row_axis = (axis + 1) % 3, column_axis = (axis + 2) % 3;
      for (const int64_t end : {int64_t(1), edges[axis]})
        for (int64_t i = 1; edges[axis] > 1 && i <= edges[row_axis]; ++i)
          for (int64_t j = 1; j <= edges[column_axis]; ++j)
            if (const int32_t piece = pieces_.get()[end * strides[axis] + i * strides[row_axis] + j * strides[column_axis]])
              visit(piece);
    }
  }

  const bool along_y_;
  const float threshold_;
  const Persistence persistence_;
  const int64_t depth_, rows_, width_, plane_, block_planes_;
  // Weights of the position modulo 3 along planes and rows in a position code.
  const std::array<int64_t, 2> weights_;
  Pages<int32_t> keys_, scratch_, positions_, targets_, pieces_;
  // Codes of the foreground scores, as returned by `code_of`.
  Pages<uint8_t> scores_;
  std::vector<int32_t> codes_;
  // Offsets from a voxel to its neighbors: a table indexed by the position codes of both voxels, and a list.
  std::array<int32_t, NUM_CODES * NUM_CODES> steps_;
  std::array<int64_t, NUM_NEIGHBORS> offsets_;
  // Index of the first plane of the next block, including the padding, and the number of planes that have already arrived for
  // this block: the plane below it, and then the plane that waits for the plane above it.
  int64_t z_ = 1, pending_planes_ = 1;
  // Pieces by number; 0 is the background. Passes with keys below the entry of a piece in `limits_` are irrelevant to the piece.
  std::vector<int32_t> limits_;
  std::vector<Piece> piece_ends_;
  Passes passes_;
  std::vector<PendingPass> pending_passes_;
  size_t prune_threshold_ = MIN_PASSES_TO_PRUNE;
  std::vector<int64_t> basin_of_;
  std::vector<double> peaks_;
  std::vector<int32_t> label_of_;
  std::vector<std::array<double, 3>> object_properties_;
};

} // namespace
