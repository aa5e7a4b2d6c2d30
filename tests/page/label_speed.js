// Measures how long corrections take in a stack of 64 x 512 x 512 voxels with 2,000 objects. Returns the third shortest of nine
// durations in milliseconds for each kind of correction.
async createLabels => {
  const { LabelEditor } = await import("/page/volumes/label_edit.js");
  const shape = [64, 512, 512], step = [1, 1, 1];
  const data = createLabels();
  const editor = new LabelEditor({ data, shape, step, fullShape: shape }, [1, 0.5, 0.5]);
  const drawCircle = radius => Array.from({ length: 60 }, (_, k) => [250 + radius * Math.cos(k / 9.5), 250 + radius * Math.sin(k / 9.5)]);
  const corrections = {
    merge: n => editor.merge(10 * n + 1, 10 * n + 2),
    delete: n => editor.delete(10 * n + 3),
    split: n => {
      const { low } = editor.objects.get(10 * n + 4);
      return editor.split([10 * n + 4], [[low[0] + 7, low[1] + 10, low[2] + 4], [low[0] + 7, low[1] + 10, low[2] + 15]]);
    },
    cut: n => {
      const { low, high } = editor.objects.get(10 * n + 5);
      return editor.cut(10 * n + 5, 0, [low[1] + 3, low[2]], [high[1], high[2]]);
    },
    outline: n => editor.addOutline(0, 3 * n, drawCircle(20 + n), editor.sketch?.kind === "add" ? editor.sketch : null),
    stroke: n => {
      const id = editor.reserveId();
      for (let k = 0; k < 4; k++) editor.stamp([30, 40 * n + 20 + k, 300], 8, { id, isErasing: false, axis: null, isOverwriting: true });
      return editor.commit("paint");
    },
    "delete 100": n => editor.delete(...Array.from({ length: 100 }, (_, k) => 1000 + 100 * n + k)),
    fill: n => {
      const id = editor.reserveId();
      for (const z of [3, 12]) editor.stamp([z, 50 * n + 20, 497], 5, { id, isErasing: false, axis: 0, isOverwriting: false });
      return editor.fillBetweenPlanes([id], 1);
    },
    "fill all": n => {
      const id = editor.reserveId();
      for (const z of [19, 28]) editor.stamp([z, 50 * n + 20, 497], 5, { id, isErasing: false, axis: 0, isOverwriting: false });
      return editor.fillBetweenPlanes([...editor.objects.keys()], 0);
    },
    undo: () => editor.undo(),
  };
  const milliseconds = {};
  for (const [name, makeEdit] of Object.entries(corrections)) {
    const durations = [];
    for (let n = 0; n < 9; n++) {
      const start = performance.now();
      if (makeEdit(n) === null) throw new Error(`${name} changed nothing`);
      durations.push(performance.now() - start);
    }
    milliseconds[name] = durations.sort((a, b) => a - b)[2];
  }
  return milliseconds;
}
