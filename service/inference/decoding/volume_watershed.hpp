// Watershed of a height map that arrives in slabs along z or y. Slabs are divided into blocks of planes.

#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "block_watershed.hpp"

namespace {

// Minimum number of passes at which redundant passes are removed. Each pass uses 12 bytes.
constexpr size_t MIN_PASSES_TO_PRUNE = size_t(1) << 16;

class VolumeWatershed {
public:
  // See `stackseg_watershed` for the arguments.
  VolumeWatershed(const Index &size, int axis, float threshold, const Persistence &persistence, int64_t block_planes,
                  int threads)
      : size_(size), axis_(axis), block_planes_(block_planes), threads_(threads), threshold_(threshold), persistence_(persistence),
        row_voxels_(size[!axis] * size[2]), blocks_(size, persistence, threads) {
    pieces_.resize(size[0] * size[1] * size[2]);
    last_keys_.resize(2 * row_voxels_), last_codes_.resize(2 * row_voxels_);
  }

  // Adds the next slab. Its last plane is processed once the plane after it arrives.
  void add(const Values &heights, const Values &foreground, int64_t planes) {
    const bool is_last = arrived_ + planes == size_[axis_];
    // While a caller waits for slabs, other threads need the cores to compute them. Do not compete with these threads.
    blocks_.set_threads(is_last || Clock::now() - idle_since_ < MAX_DELAY ? threads_ : 1);
    Index first{};
    first[axis_] = arrived_;
    const Scores scores(heights, foreground, first, threshold_);
    const auto write_row = [&](const Index &voxel, int64_t count, int32_t *keys, uint8_t *codes) {
      if (voxel[axis_] >= arrived_)
        return scores.write_row(voxel, count, keys, codes);
      std::copy_n(last_keys_.get() + last_row(voxel), count, keys);
      std::copy_n(last_codes_.get() + last_row(voxel), count, codes);
    };
    const int64_t end = is_last ? size_[axis_] : arrived_ + planes - 1;
    for (int64_t plane = std::max(arrived_ - 1, int64_t(0)); plane < end; plane += block_planes_) {
      Box box{{}, size_};
      box.first[axis_] = plane, box.end[axis_] = std::min(plane + block_planes_, end);
      if (box.end[axis_] < size_[axis_])
        clear_plane(box.end[axis_]);
      blocks_.add(box, write_row, pieces_.get());
      prune_passes();
    }
    for (int64_t plane = std::max(arrived_, arrived_ + planes - 2); plane < arrived_ + planes; ++plane)
      for (int64_t row = 0; row < size_[!axis_]; ++row) {
        Index voxel{};
        voxel[axis_] = plane, voxel[!axis_] = row;
        scores.write_row(voxel, size_[2], last_keys_.get() + last_row(voxel), last_codes_.get() + last_row(voxel));
      }
    arrived_ += planes;
    idle_since_ = Clock::now();
  }

  // Joins pieces to basins and basins to objects, and filters the objects; returns the number of remaining objects.
  int64_t join(int64_t min_voxels, bool drop_border) {
    const int64_t basins = number_basins();
    const std::vector<int64_t> object = merge(basins);
    std::vector<int64_t> voxels(basins, 0), foreground(basins, 0);
    for (size_t piece = 1; piece < blocks_.ends().size(); ++piece) {
      voxels[object[basin_of_[piece]]] += blocks_.ends()[piece].voxels;
      foreground[object[basin_of_[piece]]] += blocks_.ends()[piece].foreground;
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
    label_of_.assign(blocks_.ends().size(), 0);
    for (size_t piece = 1; piece < blocks_.ends().size(); ++piece)
      label_of_[piece] = numbers[object[basin_of_[piece]]];
    return count;
  }

  // Returns, after `join`, for every object: number of voxels, sum of their probabilities, distance at the peak.
  const std::vector<std::array<double, 3>> &object_properties() const { return object_properties_; }

  // After `join`, writes the labels [Z, Y, X], given the label of each object in `numbers` [objects + 1]; 0 is the background.
  template <typename Label> void label(const int32_t *numbers, Label *labels) {
    std::vector<Label> label_of(label_of_.size());
    std::transform(label_of_.begin(), label_of_.end(), label_of.begin(),
                   [&](int32_t object) { return static_cast<Label>(numbers[object]); });
    const int64_t plane = size_[1] * size_[2];
    const int32_t *const pieces = pieces_.get();
    ThreadPool::get().run(threads_, size_[0], [&](int64_t z, int) {
      for (int64_t voxel = z * plane; voxel < (z + 1) * plane; ++voxel)
        labels[voxel] = label_of[pieces[voxel]];
    });
  }

private:
  // Returns the position in `last_keys_` of a voxel in the last two planes that have arrived.
  int64_t last_row(const Index &voxel) const {
    return voxel[axis_] % 2 * row_voxels_ + voxel[!axis_] * size_[2] + voxel[2];
  }

  // Marks the pieces of a plane as unknown.
  void clear_plane(int64_t plane) {
    Box box{{}, size_};
    box.first[axis_] = plane, box.end[axis_] = plane + 1;
    for (int64_t z = box.first[0]; z < box.end[0]; ++z)
      for (int64_t y = box.first[1]; y < box.end[1]; ++y)
        std::fill_n(pieces_.get() + (z * size_[1] + y) * size_[2], size_[2], 0);
  }

  // Removes redundant passes. In crowded stacks without clear peaks, they would need many times the memory of the stack.
  void prune_passes() {
    if (blocks_.passes().size() < prune_threshold_)
      return;
    for (Pass &pass : blocks_.passes())
      pass.first = last_known(pass.first), pass.second = last_known(pass.second);
    prune(blocks_.passes(), blocks_.ends().size(), [this](int32_t key) { return persistence_.distance(height_of(key)); });
    prune_threshold_ = std::max(MIN_PASSES_TO_PRUNE, 2 * blocks_.passes().size());
  }

  // Returns the last known piece that the path of a piece leads to.
  int32_t last_known(int32_t piece) const {
    for (int32_t next; (next = pieces_.get()[blocks_.ends()[piece].position]) && next != piece;)
      piece = next;
    return piece;
  }

  // Determines the basin of every piece; returns the number of basins, ordered by the positions of their maxima.
  int64_t number_basins() {
    const int64_t count = static_cast<int64_t>(blocks_.ends().size());
    std::vector<int32_t> link(count), maxima;
    for (int32_t piece = 1; piece < count; ++piece)
      if ((link[piece] = pieces_.get()[blocks_.ends()[piece].position]) == piece)
        maxima.push_back(piece);
    std::sort(maxima.begin(), maxima.end(),
              [this](int32_t a, int32_t b) { return blocks_.ends()[a].position < blocks_.ends()[b].position; });
    basin_of_.assign(count, -1);
    peaks_.clear();
    for (size_t basin = 0; basin < maxima.size(); ++basin) {
      basin_of_[maxima[basin]] = static_cast<int32_t>(basin);
      peaks_.push_back(persistence_.distance(height_of(blocks_.ends()[maxima[basin]].key)));
    }
    for (int32_t piece = 1; piece < count; ++piece)
      basin_of_[piece] = basin_of_[root_of(link, piece)];
    return static_cast<int64_t>(maxima.size());
  }

  // Returns the object of every basin: the number of its highest basin.
  std::vector<int64_t> merge(int64_t basins) {
    std::vector<int64_t> parent(basins);
    std::iota(parent.begin(), parent.end(), 0);
    for (const ShallowPass &pass : find_shallow_passes()) {
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

  struct ShallowPass {
    double height;
    int64_t first, second;
  };

  // Returns the shallow passes between basins by descending height, then by their numbers. A pair may occur several times.
  std::vector<ShallowPass> find_shallow_passes() {
    std::vector<ShallowPass> shallow;
    for (const Pass &pass : blocks_.passes()) {
      const int64_t first = basin_of_[pass.first], second = basin_of_[pass.second];
      const double height = persistence_.distance(height_of(pass.key)), first_peak = peaks_[first], second_peak = peaks_[second];
      // A peak of NaN has no shallow passes.
      const bool is_comparable = !std::isnan(first_peak) && !std::isnan(second_peak);
      if (first != second && is_comparable && std::min(first_peak, second_peak) - height < persistence_.depth)
        shallow.push_back({height, std::min(first, second), std::max(first, second)});
    }
    std::sort(shallow.begin(), shallow.end(), [](const ShallowPass &a, const ShallowPass &b) {
      return a.height != b.height ? a.height > b.height : a.first != b.first ? a.first < b.first : a.second < b.second;
    });
    return shallow;
  }

  // Calls `visit` with the piece of every voxel in the first and last plane along each axis that is longer than one voxel.
  template <typename Visit> void visit_faces(Visit visit) const {
    const Index strides = {size_[1] * size_[2], size_[2], 1};
    for (int axis = 0; axis < 3; ++axis) {
      const int row_axis = (axis + 1) % 3, column_axis = (axis + 2) % 3;
      for (const int64_t end : {int64_t(0), size_[axis] - 1})
        for (int64_t i = 0; size_[axis] > 1 && i < size_[row_axis]; ++i)
          for (int64_t j = 0; j < size_[column_axis]; ++j)
            if (const int32_t piece = pieces_.get()[end * strides[axis] + i * strides[row_axis] + j * strides[column_axis]])
              visit(piece);
    }
  }

  using Clock = std::chrono::steady_clock;

  // If a slab arrives within this time after the previous slab has been processed, slabs arrive faster than they are processed.
  static constexpr std::chrono::milliseconds MAX_DELAY{1};

  const Index size_;
  const int axis_;
  const int64_t block_planes_;
  const int threads_;
  const float threshold_;
  const Persistence persistence_;
  // Number of planes that have arrived along `axis_`, and keys and codes of the last two of them, by the parity of the plane.
  int64_t arrived_ = 0;
  // Time at which the last slab had been processed.
  Clock::time_point idle_since_ = Clock::now();
  const int64_t row_voxels_;
  Buffer<int32_t> last_keys_;
  Buffer<uint8_t> last_codes_;
  BlockWatershed blocks_;
  // Piece of every voxel; 0 is the background.
  Buffer<int32_t> pieces_;
  size_t prune_threshold_ = MIN_PASSES_TO_PRUNE;
  std::vector<int32_t> basin_of_;
  std::vector<double> peaks_;
  std::vector<int32_t> label_of_;
  std::vector<std::array<double, 3>> object_properties_;
};

} // namespace
