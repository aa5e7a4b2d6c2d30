// Returns labels of 64 x 512 x 512 voxels: 4 x 22 x 22 = 1,936 boxes of 15 x 20 x 20 voxels with gaps between them.
() => {
  const labels = new Uint16Array(64 * 512 * 512);
  let id = 0;
  for (let z = 0; z < 64; z += 16)
    for (let y = 0; y < 484; y += 22)
      for (let x = 0; x < 484; x += 22) {
        id += 1;
        for (let w = z; w < z + 15; w++)
          for (let v = y; v < y + 20; v++) labels.fill(id, (w * 512 + v) * 512 + x, (w * 512 + v) * 512 + x + 20);
      }
  return labels;
}
