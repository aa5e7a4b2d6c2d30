// Applies random corrections to random labels. Returns descriptions of the properties that they violate.
async ([seed, steps]) => {
  const { LabelEditor, EditError } = await import("/page/volumes/label_edit.js");
  const { haveSimilarColors } = await import("/page/volumes/label_colors.js");
  let state = seed;
  const randomBelow = limit => Math.floor(((state = (state * 1103515245 + 12345) % 2147483648) / 2147483648) * limit);
  const pick = list => list[randomBelow(list.length)];
  const shape = [9, 20, 24], step = [1, 1, 1], voxelSize = [2, 0.5, 0.5];
  const original = new Uint8Array(9 * 20 * 24);
  for (let id = 1; id <= 12; id++) {
    const [z0, y0, x0] = [randomBelow(6), randomBelow(14), randomBelow(18)];
    for (let z = z0; z < z0 + 4 && z < 9; z++)
      for (let y = y0; y < y0 + 7 && y < 20; y++)
        for (let x = x0; x < x0 + 7 && x < 24; x++) original[(z * 20 + y) * 24 + x] = 240 + id;
  }
  const createEditor = () => new LabelEditor({ data: original.slice(), shape, step, fullShape: shape }, voxelSize);
  const editor = createEditor(), failures = [];
  const countVoxels = () => {
    const counts = new Map();
    for (const id of editor.labels.data) if (id) counts.set(id, (counts.get(id) ?? 0) + 1);
    return counts;
  };
  const sumCounts = counts => [...counts.values()].reduce((sum, count) => sum + count, 0);
  const randomVoxel = () => [randomBelow(9), randomBelow(20), randomBelow(24)];
  const listVoxels = id => {
    const voxels = [];
    editor.labels.data.forEach((label, p) => label === id && voxels.push([Math.floor(p / 480), Math.floor(p / 24) % 20, p % 24]));
    return voxels;
  };
  const drawOutline = () => {
    const [v, u, r] = [randomBelow(20), randomBelow(24), 2 + randomBelow(6)];
    return Array.from({ length: 9 }, (_, k) => [v + r * Math.cos(k * 0.7), u + r * Math.sin(k * 0.7)]);
  };
  const expectations = {
    merge: (before, after) => sumCounts(before) === sumCounts(after) && after.size === before.size - 1,
    split: (before, after) => sumCounts(before) === sumCounts(after) && after.size === before.size + 1,
    delete: (before, after) => after.size === before.size - deletedCount && sumCounts(after) < sumCounts(before),
    add: (before, after) => [...before].every(([id, voxels]) => after.get(id) === voxels || id === (editor.sketch?.id ?? extendedId)),
    paint: (before, after) => sumCounts(after) >= sumCounts(before),
    erase: (before, after) => sumCounts(after) < sumCounts(before),
    fill: (before, after) => sumCounts(after) > sumCounts(before) && after.size === before.size,
  };
  let deletedCount = 0, extendedId = 0;
  const usedIds = new Set(countVoxels().keys());
  const corrections = {
    merge: ids => editor.merge(pick(ids), pick(ids)),
    cut: ids => editor.cut(pick(ids), randomBelow(3), [randomBelow(20), randomBelow(24)], [randomBelow(20), randomBelow(24)]),
    split: ids => {
      const { sketch } = editor;
      if (sketch?.kind === "split") return editor.split(sketch.ids, [...sketch.seeds, pick(listVoxels(pick(sketch.ids)))]);
      const id = pick(ids), voxels = listVoxels(id);
      return editor.split([id], [pick(voxels), pick(voxels)]);
    },
    delete: ids => {
      deletedCount = 1 + randomBelow(2);
      return ids.length > 6 ? editor.delete(...ids.slice(-deletedCount)) : null;
    },
    fill: ids => editor.fillBetweenPlanes(ids, randomBelow(3)),
    extend: ids => {
      const axis = randomBelow(3);
      extendedId = pick(ids);
      return editor.extendWithOutline(extendedId, axis, randomBelow(shape[axis]), drawOutline());
    },
    outline: () => {
      const sketch = editor.sketch?.kind === "add" ? editor.sketch : null, axis = sketch?.axis ?? randomBelow(3);
      return editor.addOutline(axis, randomBelow(shape[axis]), drawOutline(), sketch);
    },
    stamp: ids => {
      const isErasing = randomBelow(2) === 1, axis = [null, 0, 1, 2][randomBelow(4)];
      const id = randomBelow(3) ? pick(ids) : editor.reserveId();
      for (let stamp = 0; stamp < 3; stamp++) editor.stamp(randomVoxel(), 0.3 + randomBelow(30) / 10, { id, isErasing, axis, isOverwriting: randomBelow(3) === 0 });
      return editor.commit(isErasing ? "erase" : "paint");
    },
  };
  for (let turn = 0; turn < steps; turn++) {
    if (randomBelow(5) === 0) {
      const current = editor.labels.data.slice();
      const count = 1 + randomBelow(4);
      let undone = 0;
      while (undone < count && editor.undo()) undone += 1;
      for (let redone = 0; redone < undone; redone++) editor.redo();
      if (String(current) !== String(editor.labels.data)) failures.push(`${turn}: labels differ after undo and redo`);
    }
    const before = countVoxels(), [name, makeEdit] = pick(Object.entries(corrections));
    let edit = null;
    const labelsBefore = String(editor.labels.data);
    try {
      edit = makeEdit([...before.keys()]);
    } catch (error) {
      if (!(error instanceof EditError)) throw error;
      if (String(editor.labels.data) !== labelsBefore) failures.push(`${turn}: ${name} was rejected but changed labels`);
    }
    const after = countVoxels();
    if (edit && !expectations[edit.kind](before, after)) failures.push(`${turn}: ${name} had an unexpected effect`);
    for (const id of after.keys()) {
      if (!before.has(id) && usedIds.has(id)) failures.push(`${turn}: ${name} reused an id`);
      usedIds.add(id);
    }
    if (edit?.kind === "split") {
      const parts = edit.sketch?.ids ?? [edit.runs[2], edit.runs[3]];
      if (parts.some((first, k) => parts.slice(k + 1).some(second => haveSimilarColors(first, second)))) failures.push(`${turn}: parts have similar colors`);
    }
    const counted = new Map([...editor.objects].map(([id, { voxelCount }]) => [id, voxelCount]));
    if (counted.size !== after.size || [...after].some(([id, voxelCount]) => counted.get(id) !== voxelCount)) failures.push(`${turn}: wrong voxel counts after ${name}`);
  }
  const finalData = editor.labels.data.slice(), edits = [...editor.edits];
  const restoredEditor = createEditor();
  if (!restoredEditor.restore(structuredClone(edits)) || String(restoredEditor.labels.data) !== String(finalData)) failures.push("corrections were not restored");
  const otherEditor = createEditor();
  otherEditor.labels.data[edits[0].runs[0]] ^= 1;
  const originalLabels = String(otherEditor.labels.data);
  if (otherEditor.restore(edits) || String(otherEditor.labels.data) !== originalLabels) failures.push("corrections were restored on other labels");
  while (editor.undo());
  if (String(editor.labels.data) !== String(original)) failures.push("undo did not restore the original labels");
  while (editor.redo());
  if (String(editor.labels.data) !== String(finalData)) failures.push("redo did not restore the corrected labels");
  return { failures, kinds: [...new Set(edits.map(edit => edit.kind))].sort(), edits: edits.length };
}
