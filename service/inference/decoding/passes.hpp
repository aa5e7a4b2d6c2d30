// Passes between pieces and basins of the watershed, and union-find to merge them.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace {

// A piece: all voxels of one block whose paths end at the same voxel.
struct Piece {
  int64_t place;  // position of the end in the volume with its rim: a maximum, or the first voxel outside the block
  int32_t voxels;
  int32_t top; // key at the end
  int64_t foreground = 0; // sum of the foreground probabilities of its voxels, in units of 1 / PROBABILITY_ONE
};

// A pass from a voxel near the top of a piece to a neighbor whose piece is not known yet.
struct PendingPass {
  int64_t place;
  int32_t piece, key;
};

template <typename Number> Number root_of(std::vector<Number> &parent, Number one) {
  while (parent[one] != one)
    one = parent[one] = parent[parent[one]];
  return one;
}

// The highest key of the passes between two numbers, for each pair of nonzero numbers.
//
// A hash table with open addressing and linear probing in contiguous memory. With one node per pair, the C library would
// free millions of nodes under a lock and block the allocations of all other threads for seconds.
class Passes {
public:
  void add(int64_t one, int64_t other, int32_t key) {
    const uint64_t pair = pair_of(one, other);
    Known &slot = recent_[mixed(pair) >> (64 - SLOT_BITS)];
    if (slot.pair != pair) {
      put(slot);
      slot = {pair, key};
    }
    slot.key = std::max(slot.key, key);
  }

  template <typename Visit> void visit_all(Visit visit) {
    for (Known &slot : recent_)
      put(slot);
    for (const Known &known : highest_)
      if (known.pair)
        visit(first_of(known.pair), second_of(known.pair), known.key);
  }

  // Renumbers both sides of every pass with `rename`, which returns numbers below `count`. Drops passes whose sides become
  // equal, and passes that are not needed because a chain of higher passes connects the same sides (a maximum spanning
  // forest by `level` of the keys): these cannot affect which objects are merged. At most slightly more passes than
  // numbers remain.
  template <typename Rename, typename Level> void prune(int64_t count, Rename rename, Level level) {
    std::vector<Known> known;
    known.reserve(count_ + recent_.size());
    visit_all([&](int64_t one, int64_t other, int32_t key) {
      const int64_t first = rename(one), second = rename(other);
      if (first != second)
        known.push_back({pair_of(first, second), key});
    });
    *this = Passes();
    std::sort(known.begin(), known.end(), [](const Known &a, const Known &b) { return a.key > b.key; });
    std::vector<int32_t> parent(count);
    std::iota(parent.begin(), parent.end(), 0);
    const auto roots = [&](const Known &pass) {
      return std::pair(root_of(parent, first_of(pass.pair)), root_of(parent, second_of(pass.pair)));
    };
    for (size_t begin = 0, end; begin < known.size(); begin = end) {
      const auto height = level(known[begin].key);
      end = begin + 1;
      while (end < known.size() && level(known[end].key) == height)
        ++end;
      // The order among passes of equal height is not defined yet, so keep all of them that connect different sides.
      const auto needed = std::partition(known.begin() + begin, known.begin() + end, [&](const Known &pass) {
        const auto [one, other] = roots(pass);
        return one != other;
      });
      for (auto pass = known.begin() + begin; pass != needed; ++pass) {
        const auto [one, other] = roots(*pass);
        parent[one] = other;
        add(first_of(pass->pair), second_of(pass->pair), pass->key);
      }
    }
  }

  // Number of pairs, without those in the cache of recent pairs.
  size_t size() const { return count_; }

private:
  // Size of the cache of recent pairs. Most passes are between pairs that occurred shortly before.
  static constexpr int SLOT_BITS = 9;
  struct Known {
    uint64_t pair;
    int32_t key;
  };
  static uint64_t pair_of(int64_t one, int64_t other) {
    return static_cast<uint64_t>(std::min(one, other)) << 32 | static_cast<uint64_t>(std::max(one, other));
  }
  static int32_t first_of(uint64_t pair) { return static_cast<int32_t>(pair >> 32); }
  static int32_t second_of(uint64_t pair) { return static_cast<int32_t>(pair & UINT32_MAX); }
  static size_t mixed(uint64_t pair) { return (pair ^ pair >> 29) * 0x9E3779B97F4A7C15; }

  void put(Known &slot) {
    if (slot.pair) {
      if (4 * count_ >= 3 * highest_.size())
        grow();
      Known &known = find(slot.pair);
      if (!known.pair)
        known = slot, ++count_;
      known.key = std::max(known.key, slot.key);
    }
    slot.pair = 0;
  }

  // Returns the slot of a pair, or the empty slot where it belongs.
  Known &find(uint64_t pair) {
    const size_t last = highest_.size() - 1;
    size_t place = mixed(pair) >> (64 - bits_);
    while (highest_[place].pair && highest_[place].pair != pair)
      place = (place + 1) & last;
    return highest_[place];
  }

  void grow() {
    std::vector<Known> before(2 * highest_.size());
    before.swap(highest_), ++bits_;
    for (const Known &known : before)
      if (known.pair)
        find(known.pair) = known;
  }

  std::array<Known, 1 << SLOT_BITS> recent_{};
  int bits_ = 6;
  std::vector<Known> highest_ = std::vector<Known>(size_t(1) << bits_);
  size_t count_ = 0;
};

struct Pass {
  double height;
  int64_t first, second;
};

} // namespace
