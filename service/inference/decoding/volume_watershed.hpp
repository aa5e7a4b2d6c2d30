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

class VolumeWatershed {
public:
  // See `stackseg_watershed` for the arguments.
  VolumeWatershed(const Index &size, int axis, float threshold, const Persistence &persistence, int64_t block_planes, int threads,
                  int32_t *pieces)
      : size_(size), axis_(axis), block_planes_(block_planes), threads_(threads), threshold_(threshold), persistence_(persistence),
        row_voxels_(size[!axis] * size[2]), blocks_(size, persistence, threads), pieces_(pieces) {}

  // Adds the next slab. Its last plane is processed once the plane after it arrives.
  void add(const Values &heights, const Values &foreground, int64_t planes) {
    last_keys_.resize(2 * row_voxels_), last_codes_.resize(2 * row_voxels_);
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
      blocks_.add(box, write_row, pieces_);
      processed_ = box.end[axis_];
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

  // Adds one block, whose `foreground` and `heights` start at the voxel `first`, and writes its pieces.
  void add_block(const Box &box, const Values &heights, const Values &foreground, const Index &first) {
    const Scores scores(heights, foreground, first, threshold_);
    blocks_.add(
        box, [&](const Index &voxel, int64_t count, int32_t *keys, uint8_t *codes) { scores.write_row(voxel, count, keys, codes); },
        nullptr);
    blocks_.write_pieces(pieces_, box.length(1) * box.length(2), box.length(2));
  }

  // Returns the pieces, and the passes between them.
  BlockWatershed &blocks() { return blocks_; }

private:
  // Returns the position in `last_keys_` of a voxel in the last two planes that have arrived.
  int64_t last_row(const Index &voxel) const {
    return voxel[axis_] % 2 * row_voxels_ + voxel[!axis_] * size_[2] + voxel[2];
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
      const int64_t position = blocks_.ends()[piece].position, row = position / size_[2];
      if ((axis_ ? row % size_[1] : row / size_[1]) >= processed_ || pieces_[position] == piece)
        return piece;
      piece = pieces_[position];
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
  // Number of planes whose pieces are known.
  int64_t processed_ = 0;
  // Time at which the last slab had been processed.
  Clock::time_point idle_since_ = Clock::now();
  const int64_t row_voxels_;
  Buffer<int32_t> last_keys_;
  Buffer<uint8_t> last_codes_;
  BlockWatershed blocks_;
  // Piece of every voxel; 0 is the background.
  int32_t *const pieces_;
  size_t prune_threshold_ = MIN_PASSES_TO_PRUNE;
};

} // namespace
