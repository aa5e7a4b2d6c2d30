// Watershed of one block of a height map. The other blocks are computed elsewhere or at a different time.
//
// Paths are the same as in `streaming_watershed.hpp`: they depend only on heights and on positions in the whole volume. A
// path that leaves the block ends at the first voxel outside the block. This voxel gets one piece number in this block, and
// another number in the block that contains it.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "height_keys.hpp"
#include "passes.hpp"

namespace {

class BlockWatershed {
public:
  // size     size of the block, [Z, Y, X]
  // origin   position of the first voxel of the block in the volume
  // volume   size of the volume
  // margins  whether there is a voxel before and after the block along each axis, [Z, Y, X] x 2
  // heights, foreground  values of the voxels in the block and in these margins
  // pieces   output [Z, Y, X]: 0 for background, else the number of a piece, from 1
  BlockWatershed(const int64_t *size, const int64_t *origin, const int64_t *volume, const int32_t *margins, float threshold,
                 Persistence persistence, const Planes &heights, const Planes &foreground, int32_t *pieces)
      : origin_{origin[0], origin[1], origin[2]}, volume_{volume[0], volume[1], volume[2]}, rows_(size[1] + 2),
        width_(size[2] + 2), plane_(rows_ * width_), planes_(size[0] + 2), keys_(planes_ * plane_), pieces_(planes_ * plane_),
        positions_(size[0] * size[1] * size[2] + 16), scores_(planes_ * plane_), persistence_(persistence) {
    std::fill_n(keys_.get(), planes_ * plane_, BACKGROUND_KEY);
    std::fill_n(pieces_.get(), planes_ * plane_, UNREACHED);
    fill(size, margins, threshold, heights, foreground);
    list_foreground_voxels();
    trace_paths();
    follow_paths();
    find_passes();
    for (int64_t z = 1; z < planes_ - 1; ++z)
      for (int64_t y = 1; y < rows_ - 1; ++y, pieces += width_ - 2)
        std::copy_n(pieces_.get() + z * plane_ + y * width_ + 1, width_ - 2, pieces);
  }

  // Pieces by number, from 1.
  const std::vector<Piece> &pieces() const { return piece_ends_; }

  // The highest pass of each pair of pieces: the two numbers and the key.
  const std::vector<std::array<int32_t, 3>> &passes() const { return piece_passes_; }

private:
  // Marks a voxel outside the block that no path has reached yet.
  static constexpr int32_t UNREACHED = INT32_MIN;

  void fill(const int64_t *size, const int32_t *margins, float threshold, const Planes &heights, const Planes &foreground) {
    const auto fill_typed = [&](auto height, auto mask) {
      const auto *const height_data = static_cast<const decltype(height) *>(heights.data);
      const auto *const foreground_data = static_cast<const decltype(mask) *>(foreground.data);
      const int64_t lengths[] = {size[0] + margins[0] + margins[1], size[1] + margins[2] + margins[3],
                                 size[2] + margins[4] + margins[5]};
      for (int64_t z = 0; z < lengths[0]; ++z)
        for (int64_t y = 0; y < lengths[1]; ++y) {
          const int64_t position = (z + 1 - margins[0]) * plane_ + (y + 1 - margins[2]) * width_ + 1 - margins[4];
          // Positions in the volume with its padding; the first voxel is at 1 along each axis.
          const int64_t plane = origin_[0] - margins[0] + z + 1, row = origin_[1] - margins[2] + y + 1,
                        first = origin_[2] - margins[4] + 1;
          const int32_t row_code = static_cast<int32_t>(9 * (plane % 3) + 3 * (row % 3));
          for (int64_t x = 0; x < lengths[2]; ++x) {
            const auto *const score =
                foreground_data + z * foreground.strides[0] + y * foreground.strides[1] + x * foreground.strides[2];
            if (is_above(score, threshold))
              keys_.get()[position + x] =
                  key_of(load_one(height_data + z * heights.strides[0] + y * heights.strides[1] + x * heights.strides[2])) +
                  row_code + static_cast<int32_t>((first + x) % 3);
            scores_.get()[position + x] = code_of(score);
          }
        }
    };
    if (foreground.kind == 2)
      heights.kind ? fill_typed(Bfloat16{}, uint8_t{}) : fill_typed(float{}, uint8_t{});
    else if (foreground.kind == 1)
      heights.kind ? fill_typed(Bfloat16{}, Bfloat16{}) : fill_typed(float{}, Bfloat16{});
    else
      heights.kind ? fill_typed(Bfloat16{}, float{}) : fill_typed(float{}, float{});
  }

  void list_foreground_voxels() {
    for (int64_t z = 1; z < planes_ - 1; ++z)
      for (int64_t y = 1; y < rows_ - 1; ++y) {
        const int64_t row = z * plane_ + y * width_;
        std::fill_n(pieces_.get() + row + 1, width_ - 2, 0);
        count_ = list_foreground(keys_.get(), row + 1, row + width_ - 1, positions_.get(), count_);
      }
  }

  // Returns the step along one axis from a voxel to its neighbor, given their position codes.
  static int64_t step(int from, int to, int64_t weight) { return (to / weight % 3 - from / weight % 3 + 4) % 3 - 1; }

  int32_t add_piece(int64_t position) {
    const int64_t z = position / plane_, y = position % plane_ / width_, x = position % width_;
    const int64_t global_position = ((origin_[0] + z - 1) * volume_[1] + origin_[1] + y - 1) * volume_[2] + origin_[2] + x - 1;
    piece_ends_.push_back({global_position, 0, keys_.get()[position]});
    return pieces_.get()[position] = static_cast<int32_t>(piece_ends_.size());
  }

  void trace_paths() {
    std::array<int32_t, NUM_CODES * NUM_CODES> steps;
    for (int from = 0; from < NUM_CODES; ++from)
      for (int to = 0; to < NUM_CODES; ++to)
        steps[from * NUM_CODES + to] =
            static_cast<int32_t>(step(from, to, 9) * plane_ + step(from, to, 3) * width_ + step(from, to, 1));
    Pages<int32_t> scratch(4 * plane_);
    int32_t *const along_x = scratch.get() + 3 * plane_;
    const int32_t *const keys = keys_.get();
    int32_t *const pieces = pieces_.get();
    const auto prepare = [&](int64_t z) {
      max_filter_plane(keys + z * plane_, plane_, width_, along_x, scratch.get() + z % 3 * plane_);
    };
    prepare(0), prepare(1);
    int64_t n = 0;
    for (int64_t z = 1; z < planes_ - 1; ++z) {
      prepare(z + 1);
      for (; n < count_ && positions_.get()[n] < (z + 1) * plane_; ++n) {
        const int32_t position = positions_.get()[n];
        const int32_t *const maxima = scratch.get() + (position - z * plane_);
        const int32_t highest = highest_of(maxima[0], maxima[plane_], maxima[2 * plane_]);
        const int32_t target = position + steps[(keys[position] & POSITION_BITS) << 5 | (highest & POSITION_BITS)];
        if (target == position || pieces[target] == UNREACHED)
          pieces[position] = add_piece(target);
        else
          // A target that has been visited may already have its piece; the piece of any other target is still zero.
          pieces[position] = pieces[target] > 0 ? pieces[target] : ~target;
      }
    }
  }

  // Follows every path to its end, and counts the voxels of each piece.
  void follow_paths() {
    int32_t *const pieces = pieces_.get();
    const std::array<int32_t, 256> &probability = probabilities();
    for (int64_t n = count_ - 1; n >= 0; --n) {
      const int32_t start = positions_.get()[n];
      int32_t end = start;
      while (pieces[end] < 0)
        end = ~pieces[end];
      const int32_t piece = pieces[end];
      for (int32_t voxel = start; pieces[voxel] < 0;) {
        const int32_t next = ~pieces[voxel];
        pieces[voxel] = piece;
        voxel = next;
      }
      Piece &piece_end = piece_ends_[piece - 1];
      ++piece_end.voxels;
      piece_end.foreground += probability[scores_.get()[start]];
    }
  }

  // Finds passes between voxels near the peaks of pieces and neighbors that belong to other pieces.
  void find_passes() {
    std::vector<int32_t> limits;
    for (const Piece &piece : piece_ends_)
      limits.push_back(persistence_.lowest_pass_key(piece.key));
    Passes passes;
    const int32_t *const keys = keys_.get();
    for (int64_t n = 0; n < count_; ++n) {
      const int64_t voxel = positions_.get()[n];
      const int32_t piece = pieces_.get()[voxel], key = keys[voxel], limit = limits[piece - 1];
      if (key < limit)
        continue;
      for (int64_t z = -plane_; z <= plane_; z += plane_)
        for (int64_t y = -width_; y <= width_; y += width_)
          for (int64_t x = -1; x <= 1; ++x) {
            const int64_t neighbor = voxel + z + y + x;
            const int32_t height = keys[neighbor];
            if (height < limit || pieces_.get()[neighbor] == piece)
              continue;
            const int32_t other = pieces_.get()[neighbor] == UNREACHED ? add_piece(neighbor) : pieces_.get()[neighbor];
            passes.add(piece, other, std::min(key, height));
          }
    }
    passes.visit_all([this](int64_t first, int64_t second, int32_t key) {
      piece_passes_.push_back({static_cast<int32_t>(first), static_cast<int32_t>(second), key});
    });
  }

  const std::array<int64_t, 3> origin_, volume_;
  const int64_t rows_, width_, plane_, planes_;
  Pages<int32_t> keys_, pieces_, positions_;
  Pages<uint8_t> scores_;
  const Persistence persistence_;
  int64_t count_ = 0;
  std::vector<Piece> piece_ends_;
  std::vector<std::array<int32_t, 3>> piece_passes_;
};

} // namespace
