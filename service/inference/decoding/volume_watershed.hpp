// Watershed of a height map that arrives in slabs along z or y. Slabs are divided into blocks of planes.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "block_watershed.hpp"

namespace {

// Minimum number of passes at which redundant passes are removed. Each pass uses 12 bytes.
constexpr size_t MIN_PASSES_TO_PRUNE = size_t(1) << 16;

// Minimum number of voxels of a slab that is processed on several threads. One thread needs 4 ms for so many voxels; it takes
// up to 5 ms until other threads get a core while the threads of OpenMP spin.
constexpr int64_t MIN_PARALLEL_VOXELS = int64_t(1) << 20;

class VolumeWatershed {
public:
  // See `stackseg_watershed` for the arguments.
  VolumeWatershed(const Index &volume, const Box &box, int axis, float threshold, const Persistence &persistence,
                  int64_t block_planes, int threads, int32_t *pieces)
      : box_(box), scores_box_(box), volume_(volume), axis_(axis), block_planes_(block_planes), threads_(threads),
        threshold_(threshold), persistence_(persistence), blocks_(volume, box, persistence, threads, pieces), pieces_(pieces),
        processed_(box.first[axis]) {
    for (int i = 0; i < 3; ++i) {
      scores_box_.first[i] = std::max(box.first[i] - 1, int64_t(0));
      scores_box_.end[i] = std::min(box.end[i] + 1, volume[i]);
    }
    arrived_ = scores_box_.first[axis];
  }

  // Adds the next slab. `scores.first` is not set. The last plane is processed once the plane after it arrives.
  void add(Scores scores, int64_t planes) {
    scores.first = scores_box_.first, scores.first[axis_] = arrived_, scores.threshold = threshold_;
    const int64_t rows = scores_box_.length(!axis_), width = scores_box_.length(2);
    last_keys_.resize(2 * rows * width), last_codes_.resize(2 * rows * width);
    const int64_t end = arrived_ + planes;
    const bool is_last = end == scores_box_.end[axis_];
    // While a caller waits for slabs, other threads need the cores to compute them. Do not compete with these threads.
    const bool is_urgent = is_last || Clock::now() - idle_since_ < MAX_DELAY;
    blocks_.set_threads(is_urgent && planes * rows * width >= MIN_PARALLEL_VOXELS ? threads_ : 1);
    const auto write_row = [&](const Index &voxel, int64_t count, int32_t *keys, uint8_t *codes) {
      if (voxel[axis_] >= arrived_)
        return scores.write_row(voxel, count, keys, codes);
      std::copy_n(last_keys_.get() + last_row(voxel), count, keys);
      std::copy_n(last_codes_.get() + last_row(voxel), count, codes);
    };
    for (const int64_t last = is_last ? box_.end[axis_] : end - 1; processed_ < last;) {
      Box block = box_;
      block.first[axis_] = processed_, block.end[axis_] = std::min(processed_ + block_planes_, last);
      blocks_.add(block, write_row);
      processed_ = block.end[axis_];
      prune_passes();
    }
    Index voxel = scores_box_.first;
    for (voxel[axis_] = std::max(arrived_, end - 2); voxel[axis_] < end; ++voxel[axis_])
      for (voxel[!axis_] = scores_box_.first[!axis_]; voxel[!axis_] < scores_box_.end[!axis_]; ++voxel[!axis_])
        scores.write_row(voxel, width, last_keys_.get() + last_row(voxel), last_codes_.get() + last_row(voxel));
    arrived_ = end;
    idle_since_ = Clock::now();
  }

  // Returns the pieces, and the passes between them.
  BlockWatershed &blocks() { return blocks_; }

private:
  // Returns the position in `last_keys_` of the first voxel of a row in the last two planes that have arrived.
  int64_t last_row(const Index &voxel) const {
    return (voxel[axis_] % 2 * scores_box_.length(!axis_) + voxel[!axis_] - scores_box_.first[!axis_]) * scores_box_.length(2);
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
    for (;;) {
      const int64_t position = blocks_.ends()[piece].position, row = position / volume_[2];
      const Index voxel = {row / volume_[1], row % volume_[1], position % volume_[2]};
      for (int i = 0; i < 3; ++i)
        if (voxel[i] < box_.first[i] || voxel[i] >= (i == axis_ ? processed_ : box_.end[i]))
          return piece;
      const int32_t known = pieces_[box_.offset(voxel)];
      if (known == piece)
        return piece;
      piece = known;
    }
  }

  using Clock = std::chrono::steady_clock;

  // If a slab arrives within this time after the previous slab has been processed, slabs arrive faster than they are processed.
  static constexpr std::chrono::milliseconds MAX_DELAY{1};

  const Box box_;
  // Voxels whose scores arrive: those of the box and their neighbors in the volume.
  Box scores_box_;
  const Index volume_;
  const int axis_;
  const int64_t block_planes_;
  const int threads_;
  const float threshold_;
  const Persistence persistence_;
  BlockWatershed blocks_;
  // Piece of every voxel in the box; 0 is the background.
  int32_t *const pieces_;
  // Ends along `axis_` of the planes that have arrived, and of the planes whose pieces are known.
  int64_t arrived_, processed_;
  // Keys and codes of the last two planes that have arrived, by the parity of the plane.
  Buffer<int32_t> last_keys_;
  Buffer<uint8_t> last_codes_;
  // Time at which the last slab had been processed.
  Clock::time_point idle_since_ = Clock::now();
  size_t prune_threshold_ = MIN_PASSES_TO_PRUNE;
};

} // namespace
