// Passes between pieces and basins of the watershed, and union-find to merge them. A pass is the saddle between two peaks.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "height_keys.hpp"

namespace {

// The highest pass between two pieces.
struct Pass {
  int32_t first, second, key;
};

template <typename Parents, typename Number> Number root_of(Parents &parent, Number node) {
  while (parent[node] != node)
    node = parent[node] = parent[parent[node]];
  return node;
}

// The highest key of the passes between each pair of pieces. Pieces are numbered from 1.
//
// This is a hash table with open addressing and linear probing in contiguous memory. A table of nodes would be slow: while
// the C library frees millions of nodes, it holds a lock that blocks other allocations for seconds.
class PassTable {
public:
  void add(uint32_t piece_a, uint32_t piece_b, int32_t key) {
    const uint64_t pair = static_cast<uint64_t>(std::min(piece_a, piece_b)) << 32 | std::max(piece_a, piece_b);
    if (4 * count_ >= 3 * highest_.size())
      grow();
    Entry &entry = find(pair);
    if (!entry.pair)
      entry = {pair, key}, ++count_;
    entry.key = std::max(entry.key, key);
  }

  // Appends all passes to a list, and clears the table. `resolve` returns the final number of a piece.
  template <typename Resolve> void move_to(std::vector<Pass> &passes, const Resolve &resolve) {
    for (Entry &entry : highest_)
      if (entry.pair) {
        passes.push_back({resolve(static_cast<uint32_t>(entry.pair >> 32)), resolve(static_cast<uint32_t>(entry.pair)), entry.key});
        entry.pair = 0;
      }
    count_ = 0;
  }

private:
  struct Entry {
    uint64_t pair;
    int32_t key;
  };
  static size_t hash(uint64_t pair) { return (pair ^ pair >> 29) * 0x9E3779B97F4A7C15; }

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

  int bits_ = 6;
  std::vector<Entry> highest_ = std::vector<Entry>(size_t(1) << bits_);
  size_t count_ = 0;
};

// Removes redundant passes: those from a piece to itself, and those between pieces that a chain of higher passes connects.
// Either this chain merges the two pieces, or they stay separate in any case. Fewer passes than the number of pieces, `count`,
// remain.
inline void prune(std::vector<Pass> &passes, size_t count, const Persistence &persistence) {
  std::sort(passes.begin(), passes.end(), [](const Pass &a, const Pass &b) { return a.key > b.key; });
  std::vector<int32_t> parent(count);
  std::iota(parent.begin(), parent.end(), 0);
  auto kept = passes.begin();
  for (auto begin = passes.begin(), end = begin; begin != passes.end(); begin = end) {
    const double height = persistence.distance(height_of(begin->key));
    while (end != passes.end() && persistence.distance(height_of(end->key)) == height)
      ++end;
    // Passes of equal height are compared before any of them is joined, because their order is not yet known.
    const auto needed = std::partition(
        begin, end, [&](const Pass &pass) { return root_of(parent, pass.first) != root_of(parent, pass.second); });
    for (auto pass = begin; pass != needed; ++pass) {
      parent[root_of(parent, pass->first)] = root_of(parent, pass->second);
      *kept++ = *pass;
    }
  }
  passes.erase(kept, passes.end());
}

} // namespace
