// Watershed of the blocks of a height map. Each block is processed in parallel.
//
// Paths of steepest ascent depend only on heights and on positions in the whole volume, so they do not depend on how the
// volume is divided. A path that leaves the block ends at the first voxel outside it. If the piece of this voxel is known, the
// path continues there. Otherwise, the voxel gets a piece, which has to be linked to the piece that the voxel gets in its own
// block. `service/inference/decoding/pieces.py` does this.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "height_keys.hpp"
#include "passes.hpp"
#include "parallel.hpp"

namespace {

// Minimum number of passes at which redundant passes are removed. In crowded stacks without clear peaks, they would need many
// times the memory of the stack.
constexpr size_t MIN_PASSES_TO_PRUNE = size_t(1) << 16;

// The end of paths in one block, and the piece of all voxels whose paths end there.
struct Piece {
  int64_t position;       // flat index of the end in the volume
  int32_t key;            // key of the end
  int32_t voxels = 0;     // number of voxels
  int64_t foreground = 0; // sum of their fixed-point foreground probabilities
};

// The arrays of a block are padded by one voxel on every side, for neighbors in other blocks. While a block is processed, a
// negative number in `pieces_` is the complement of the position of the voxel's highest neighbor. Pieces are final once they
// are positive, so threads can read the pieces of any voxel while other threads follow paths.
class BlockWatershed {
public:
  // See `stackseg_watershed` for the arguments.
  BlockWatershed(const Index &volume, const Box &area, int axis, float threshold, const Persistence &persistence,
                 const int32_t *probabilities, int32_t *pieces)
      : volume_(volume), area_(area), axis_(axis), threshold_(threshold), persistence_(persistence),
        probabilities_(probabilities), area_pieces_(pieces) {}

  // Adds a block; see `stackseg_block`.
  void add(const Box &box, const Scores &scores, int32_t *workspace, int threads) {
    box_ = box, threads_ = threads;
    rows_ = box.length(1) + 2, width_ = box.length(2) + 2, plane_ = rows_ * width_, planes_ = box.length(0) + 2;
    keys_ = workspace, pieces_ = keys_ + planes_ * plane_, positions_ = pieces_ + planes_ * plane_;
    codes_ = reinterpret_cast<uint8_t *>(positions_ + planes_ * plane_ + 1);
    run(planes_, [&](int64_t z, int) { fill_plane(z, scores); });
    keep_last_planes();
    // More parts than threads, because their numbers of foreground voxels differ.
    const int64_t parts = threads_ == 1 ? 1 : std::min<int64_t>(planes_ - 2, 4 * threads_);
    parts_.resize(parts);
    maxima_.resize(std::max<size_t>(maxima_.size(), 4 * plane_ * threads_));
    tables_.resize(std::max<size_t>(tables_.size(), threads_));
    run(parts, [&](int64_t part, int worker) { trace_paths(part, worker); });
    add_pieces();
    run(parts, [&](int64_t part, int) { follow_paths(part); });
    run(parts, [&](int64_t part, int worker) {
      find_passes(part, worker);
      write_pieces(part);
    });
    collect_passes();
    if (passes_.size() < prune_threshold_)
      return;
    for (Pass &pass : passes_)
      pass.first = last_known(pass.first), pass.second = last_known(pass.second);
    prune(passes_, ends_.size(), persistence_);
    prune_threshold_ = std::max(MIN_PASSES_TO_PRUNE, 2 * passes_.size());
  }

  // Pieces by number, from 1.
  const std::vector<Piece> &ends() const { return ends_; }

  // Passes between pairs of pieces. A pair may occur several times.
  const std::vector<Pass> &passes() const { return passes_; }

private:
  // Marks a voxel outside the block whose piece is not known.
  static constexpr int32_t UNKNOWN = INT32_MIN;

  // Consecutive planes of the block, which one thread processes.
  struct Part {
    int64_t first_plane, end_plane;
    int64_t first, count, first_near_peak; // foreground voxels: a range of `positions_`
    std::vector<int32_t> maxima, exits;    // positions of maxima, and of voxels outside the block where paths end
  };

  template <typename Work> void run(int64_t count, const Work &work) const {
    run_parallel(threads_, count, work);
  }

  bool is_outside(int64_t z, int64_t y) const { return z == 0 || z == planes_ - 1 || y == 0 || y == rows_ - 1; }

  // Writes the keys and codes of a plane, and the known pieces. Voxels outside the volume are background.
  void fill_plane(int64_t z, const Scores &scores) {
    const int64_t first = std::max(box_.first[2] - 1, int64_t(0)), end = std::min(box_.end[2] + 1, volume_[2]);
    const int64_t skipped = first - (box_.first[2] - 1);
    for (int64_t y = 0; y < rows_; ++y) {
      const Index voxel = {box_.first[0] + z - 1, box_.first[1] + y - 1, box_.first[2]};
      const int64_t row = z * plane_ + y * width_;
      int32_t *const keys = keys_ + row, *const pieces = pieces_ + row;
      if (!last_keys_.empty() && (axis_ == 0 ? z : y) < 2) {
        const int64_t last_row = (axis_ == 0 ? z * rows_ + y : 2 * z + y) * width_;
        std::copy_n(last_keys_.data() + last_row, width_, keys);
        std::copy_n(last_codes_.data() + last_row, width_, codes_ + row);
      } else {
        std::fill_n(keys, width_, BACKGROUND_KEY);
        if (Box{{0, 0, 0}, volume_}.contains(voxel))
          scores.write_row({voxel[0], voxel[1], first}, end - first, threshold_, keys + skipped, codes_ + row + skipped);
      }
      pieces[0] = pieces[width_ - 1] = UNKNOWN;
      if (is_outside(z, y))
        std::fill_n(pieces, width_, UNKNOWN);
      // The previous block is before this one along z or y.
      if ((z == 0 || y == 0) && area_.contains(voxel)) {
        const int32_t *const known = area_pieces_ + area_.offset(voxel);
        for (int64_t x = 0; x < width_ - 2; ++x)
          pieces[x + 1] = known[x] ? known[x] : UNKNOWN;
      }
    }
  }

  // Keeps the keys and codes of the last two planes along the axis: they are the first two planes of the next block.
  void keep_last_planes() {
    last_keys_.clear(), last_codes_.clear();
    for (int64_t z = axis_ == 0 ? planes_ - 2 : 0; z < planes_; ++z) {
      const int64_t first = z * plane_ + (axis_ == 0 ? 0 : plane_ - 2 * width_), end = (z + 1) * plane_;
      last_keys_.insert(last_keys_.end(), keys_ + first, keys_ + end);
      last_codes_.insert(last_codes_.end(), codes_ + first, codes_ + end);
    }
  }

  // Writes the pieces of a part of the block; 0 is the background.
  void write_pieces(int64_t number) const {
    for (int64_t z = parts_[number].first_plane; z < parts_[number].end_plane; ++z)
      for (int64_t y = 1; y < rows_ - 1; ++y) {
        const int64_t row = z * plane_ + y * width_ + 1;
        const int32_t *const keys = keys_ + row, *const pieces = pieces_ + row;
        int32_t *const to = area_pieces_ + area_.offset({box_.first[0] + z - 1, box_.first[1] + y - 1, box_.first[2]});
        for (int64_t x = 0; x < width_ - 2; ++x)
          to[x] = keys[x] == BACKGROUND_KEY ? 0 : pieces[x];
      }
  }

  // Returns the flat index in the volume of a position in the padded block.
  int64_t get_position(int64_t position) const {
    const int64_t z = box_.first[0] + position / plane_ - 1, y = box_.first[1] + position % plane_ / width_ - 1,
                  x = box_.first[2] + position % width_ - 1;
    return (z * volume_[1] + y) * volume_[2] + x;
  }

  // Finds the highest neighbor of each foreground voxel.
  void trace_paths(int64_t number, int worker) {
    Part &part = parts_[number];
    part.maxima.clear(), part.exits.clear();
    const int64_t planes = planes_ - 2, parts = static_cast<int64_t>(parts_.size());
    const int64_t first = 1 + planes * number / parts, end = 1 + planes * (number + 1) / parts;
    part.first_plane = first, part.end_plane = end, part.first = first * plane_, part.count = 0;
    const bool is_cut_along_x = box_.first[2] > 0 || box_.end[2] < volume_[2];
    int32_t *const maxima = maxima_.data() + worker * 4 * plane_;
    const auto find_maxima = [&](int64_t z) {
      max_filter_plane(keys_ + z * plane_, plane_, width_, maxima + 3 * plane_, maxima + z % 3 * plane_);
    };
    const Steps steps(plane_, width_);
    find_maxima(first - 1), find_maxima(first);
    for (int64_t z = first; z < end; ++z) {
      find_maxima(z + 1);
      for (int64_t y = 1; y < rows_ - 1; ++y) {
        const bool is_at_face = is_cut_along_x || is_outside(z - 1, y - 1) || is_outside(z + 1, y + 1);
        trace_row(part, steps, maxima, z, y, is_at_face);
      }
    }
  }

  void trace_row(Part &part, const Steps &steps, const int32_t *maxima, int64_t z, int64_t y, bool is_at_face) {
    const int32_t *const keys = keys_;
    int32_t *const pieces = pieces_, *const positions = positions_ + part.first;
    const int64_t row = z * plane_ + y * width_;
    int64_t count = part.count;
    // Branchless, because a branch would be mispredicted at the edge of every object. The last value may not belong to the list.
    for (int64_t position = row + 1; position < row + width_ - 1; ++position) {
      positions[count] = static_cast<int32_t>(position);
      count += keys[position] != BACKGROUND_KEY;
    }
    for (; part.count < count; ++part.count) {
      const int32_t position = positions[part.count];
      const int32_t *const highest = maxima + (position - z * plane_);
      const int32_t target =
          position + steps.between(keys[position], highest_of(highest[0], highest[plane_], highest[2 * plane_]));
      pieces[position] = ~target;
      if (target == position)
        part.maxima.push_back(position);
      else if (is_at_face && is_outside(target))
        part.exits.push_back(target);
    }
  }

  bool is_outside(int64_t position) const {
    const int64_t x = position % width_;
    return x == 0 || x == width_ - 1 || is_outside(position / plane_, position % plane_ / width_);
  }

  // Adds a piece for each end of a path.
  void add_pieces() {
    for (const Part &part : parts_) {
      for (const int32_t position : part.maxima)
        add_piece(position);
      for (const int32_t position : part.exits)
        if (pieces_[position] == UNKNOWN)
          add_piece(position);
    }
  }

  int32_t add_piece(int32_t position) {
    const int32_t piece = static_cast<int32_t>(ends_.size());
    const int32_t key = keys_[position];
    ends_.push_back({get_position(position), key});
    limits_.push_back(persistence_.lowest_pass_key(key));
    return pieces_[position] = piece;
  }

  // Follows every path to its end, and adds up the voxels of each piece. Voxels near the peaks of their pieces are moved to
  // the end of the list.
  void follow_paths(int64_t number) {
    Part &part = parts_[number];
    int32_t *const pieces = pieces_, *const positions = positions_ + part.first;
    const int32_t *const keys = keys_;
    const uint8_t *const codes = codes_;
    int32_t counted_piece = 0;
    int64_t run = part.count, sum = 0, near_peak = part.count;
    int32_t limit = 0;
    // Add runs of voxels: incrementing one number for each voxel would stall the pipeline.
    const auto add_run = [&](int64_t voxels) {
      __atomic_fetch_add(&ends_[counted_piece].voxels, static_cast<int32_t>(voxels), __ATOMIC_RELAXED);
      __atomic_fetch_add(&ends_[counted_piece].foreground, sum, __ATOMIC_RELAXED);
    };
    // In reverse order, because most paths lead to voxels that have been visited then.
    for (int64_t n = part.count - 1; n >= 0; --n) {
      const int32_t voxel = positions[n];
      const int32_t piece = follow(pieces, voxel);
      if (piece != counted_piece) {
        add_run(run - n - 1);
        counted_piece = piece, run = n + 1, sum = 0, limit = limits_[piece];
      }
      sum += probabilities_[codes[voxel]];
      // Branchless: the next voxel overwrites this one if it is not near the peak.
      positions[near_peak - 1] = voxel;
      near_peak -= keys[voxel] >= limit;
    }
    add_run(run);
    part.first_near_peak = near_peak;
  }

  static int32_t load(const int32_t *piece) { return __atomic_load_n(piece, __ATOMIC_RELAXED); }
  static void store(int32_t *piece, int32_t value) { __atomic_store_n(piece, value, __ATOMIC_RELAXED); }

  // Returns the piece at the end of a path, and stores it for every voxel of the path.
  static int32_t follow(int32_t *pieces, int32_t voxel) {
    int32_t end = voxel, piece;
    while ((piece = load(pieces + end)) < 0)
      end = ~piece;
    for (int32_t entry; (entry = load(pieces + voxel)) < 0; voxel = ~entry)
      store(pieces + voxel, piece);
    return piece;
  }

  // Finds passes between voxels near the peaks of pieces and neighbors that belong to other pieces.
  void find_passes(int64_t number, int worker) {
    std::array<int64_t, NUM_NEIGHBORS> offsets;
    for (int i = 0, neighbor = 0; i < 27; ++i)
      if (i != 13)
        offsets[neighbor++] = (i / 9 - 1) * plane_ + (i / 3 % 3 - 1) * width_ + i % 3 - 1;
    const Part &part = parts_[number];
    PassTable &table = tables_[worker];
    const int32_t *const keys = keys_, *const pieces = pieces_;
    for (int64_t n = part.first_near_peak; n < part.count; ++n) {
      const int64_t voxel = positions_[part.first + n];
      const int32_t piece = pieces[voxel], key = keys[voxel], limit = limits_[piece];
      for (const int64_t offset : offsets) {
        const int64_t neighbor = voxel + offset;
        const int32_t other = pieces[neighbor], height = keys[neighbor];
        if (other != piece && height >= limit)
          // Positions are distinguished from pieces by their highest bit.
          table.add(piece, other == UNKNOWN ? static_cast<uint32_t>(~neighbor) : other, std::min(key, height));
      }
    }
  }

  void collect_passes() {
    for (PassTable &table : tables_)
      table.move_to(passes_, [&](uint32_t piece_or_position) {
        const int32_t piece = static_cast<int32_t>(piece_or_position);
        if (piece > 0)
          return piece;
        const int32_t known_piece = pieces_[~piece];
        return known_piece == UNKNOWN ? add_piece(~piece) : known_piece;
      });
  }

  // Returns the last known piece that the path of a piece leads to.
  int32_t last_known(int32_t piece) const {
    const Box known = {area_.first, box_.end};
    for (;;) {
      const int64_t position = ends_[piece].position, row = position / volume_[2];
      const Index voxel = {row / volume_[1], row % volume_[1], position % volume_[2]};
      if (!known.contains(voxel) || area_pieces_[area_.offset(voxel)] == piece)
        return piece;
      piece = area_pieces_[area_.offset(voxel)];
    }
  }

  const Index volume_;
  const Box area_;
  const int axis_;
  const float threshold_;
  const Persistence persistence_;
  const int32_t *const probabilities_;
  int32_t *const area_pieces_;
  // Arrays of the block. The codes are those of the foreground scores, as returned by `code_of`.
  int32_t *keys_ = nullptr, *pieces_ = nullptr, *positions_ = nullptr;
  uint8_t *codes_ = nullptr;
  // Keys and codes of the last two planes of the previous block.
  std::vector<int32_t> last_keys_;
  std::vector<uint8_t> last_codes_;
  Box box_;
  int threads_ = 1;
  int64_t rows_ = 0, width_ = 0, plane_ = 0, planes_ = 0;
  // Per thread, the highest keys in three planes, and a temporary plane.
  std::vector<int32_t> maxima_;
  std::vector<Part> parts_;
  std::vector<PassTable> tables_;
  std::vector<Piece> ends_ = {{-1, BACKGROUND_KEY}};
  // Passes with keys below the entry of a piece are irrelevant to the piece.
  std::vector<int32_t> limits_ = {0};
  std::vector<Pass> passes_;
  size_t prune_threshold_ = MIN_PASSES_TO_PRUNE;
};

} // namespace
