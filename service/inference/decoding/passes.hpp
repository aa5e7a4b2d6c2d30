// Passes between pieces and basins of the watershed, and union-find to merge them. A pass is the saddle between two peaks.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace {

// The end of paths in one block, and the piece of all voxels whose paths end there.
struct Piece {
  int64_t position;       // position of the end's highest neighbor, or of the end itself if it is a maximum
  int32_t voxels;         // number of voxels
  int32_t key;            // key at this position
  int64_t foreground = 0; // sum of the foreground probabilities of its voxels, times `PROBABILITY_ONE`
};

// A pass from a voxel near the peak of a piece to a neighbor whose piece is not yet known.
struct PendingPass {
  int64_t position;
  int32_t piece, key;
};

template <typename Number> Number root_of(std::vector<Number> &parent, Number node) {
  while (parent[node] != node)
    node = parent[node] = parent[parent[node]];
  return node;
}

// The highest key of the passes between each pair of pieces. Pieces are numbered from 1.
//
// This is a hash table with open addressing and linear probing in contiguous memory. A table of nodes would be slow: while
// the C library frees millions of nodes, it holds a lock that blocks other allocations for seconds.
class Passes {
public:
  void add(int64_t piece_a, int64_t piece_b, int32_t key) {
    const uint64_t pair = pair_of(piece_a, piece_b);
    Entry &slot = recent_[hash(pair) >> (64 - SLOT_BITS)];
    if (slot.pair != pair) {
      flush(slot);
      slot = {pair, key};
    }
    slot.key = std::max(slot.key, key);
  }

  template <typename Visit> void visit_all(Visit visit) {
    for (Entry &slot : recent_)
      flush(slot);
    for (const Entry &entry : highest_)
      if (entry.pair)
        visit(first_of(entry.pair), second_of(entry.pair), entry.key);
  }

  // Renumbers each pair by `rename`, which returns numbers below `count`, and removes redundant pairs. A pair is redundant if
  // its numbers are equal, or if a chain of higher passes connects the same two pieces: either this chain merges the pieces,
  // or they stay separate in any case. Passes are compared by the heights that `to_height` returns for their keys. At most
  // about `count` pairs remain.
  template <typename Rename, typename ToHeight> void prune(int64_t count, Rename rename, ToHeight to_height) {
    std::vector<Entry> entries;
    entries.reserve(count_ + recent_.size());
    visit_all([&](int64_t piece_a, int64_t piece_b, int32_t key) {
      const int64_t first = rename(piece_a), second = rename(piece_b);
      if (first != second)
        entries.push_back({pair_of(first, second), key});
    });
    *this = Passes();
    std::sort(entries.begin(), entries.end(), [](const Entry &a, const Entry &b) { return a.key > b.key; });
    std::vector<int32_t> parent(count);
    std::iota(parent.begin(), parent.end(), 0);
    const auto roots = [&](const Entry &pass) {
      return std::pair(root_of(parent, first_of(pass.pair)), root_of(parent, second_of(pass.pair)));
    };
    for (size_t begin = 0, end; begin < entries.size(); begin = end) {
      const auto height = to_height(entries[begin].key);
      end = begin + 1;
      while (end < entries.size() && to_height(entries[end].key) == height)
        ++end;
      // Passes of equal height are compared before any of them is joined, because their order is not yet known.
      const auto needed = std::partition(entries.begin() + begin, entries.begin() + end, [&](const Entry &pass) {
        const auto [root_a, root_b] = roots(pass);
        return root_a != root_b;
      });
      for (auto pass = entries.begin() + begin; pass != needed; ++pass) {
        const auto [root_a, root_b] = roots(*pass);
        parent[root_a] = root_b;
        add(first_of(pass->pair), second_of(pass->pair), pass->key);
      }
    }
  }

  // Returns the number of pairs, not counting those in the cache of recent pairs.
  size_t size() const { return count_; }

private:
  // Most passes belong to a recent pair, so recent pairs are stored in a small direct-mapped cache of 2^SLOT_BITS slots.
  static constexpr int SLOT_BITS = 9;
  struct Entry {
    uint64_t pair;
    int32_t key;
  };
  static uint64_t pair_of(int64_t piece_a, int64_t piece_b) {
    return static_cast<uint64_t>(std::min(piece_a, piece_b)) << 32 | static_cast<uint64_t>(std::max(piece_a, piece_b));
  }
  static int32_t first_of(uint64_t pair) { return static_cast<int32_t>(pair >> 32); }
  static int32_t second_of(uint64_t pair) { return static_cast<int32_t>(pair & UINT32_MAX); }
  static size_t hash(uint64_t pair) { return (pair ^ pair >> 29) * 0x9E3779B97F4A7C15; }

  void flush(Entry &slot) {
    if (slot.pair) {
      if (4 * count_ >= 3 * highest_.size())
        grow();
      Entry &entry = find(slot.pair);
      if (!entry.pair)
        entry = slot, ++count_;
      entry.key = std::max(entry.key, slot.key);
    }
    slot.pair = 0;
  }

  // Returns the entry of the pair, or the free entry for it.
  Entry &find(uint64_t pair) {
    const size_t last = highest_.size() - 1;
    size_t index = hash(pair) >> (64 - bits_);
    while (highest_[index].pair && highest_[index].pair != pair)
      index = (index + 1) & last;
    return highest_[index];
  }

  void grow() {
    std::vector<Entry> old_entries(2 * highest_.size());
    old_entries.swap(highest_), ++bits_;
    for (const Entry &entry : old_entries)
      if (entry.pair)
        find(entry.pair) = entry;
  }

  std::array<Entry, 1 << SLOT_BITS> recent_{};
  int bits_ = 6;
  std::vector<Entry> highest_ = std::vector<Entry>(size_t(1) << bits_);
  size_t count_ = 0;
};

struct Pass {
  double height;
  int64_t first, second;
};

} // namespace
