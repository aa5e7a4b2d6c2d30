// Applies random corrections to random labels, and returns the violated properties.
async ([seed, steps]) => {
  const { LabelEditor, CannotEdit } = await import("/page/volumes/label_edit.js");
  const { haveSimilarColors } = await import("/page/volumes/slices.js");
  let state = seed;
  const random = below => Math.floor(((state = (state * 1103515245 + 12345) % 2147483648) / 2147483648) * below);
  const pick = list => list[random(list.length)];
  const shape = [9, 20, 24], step = [1, 1, 1], voxel = [2, 0.5, 0.5];
  const original = new Uint8Array(9 * 20 * 24);
  for (let id = 1; id <= 12; id++) {
    const [z0, y0, x0] = [random(6), random(14), random(18)];
    for (let z = z0; z < z0 + 4 && z < 9; z++)
      for (let y = y0; y < y0 + 7 && y < 20; y++)
        for (let x = x0; x < x0 + 7 && x < 24; x++) original[(z * 20 + y) * 24 + x] = 240 + id;
  }
  const open = () => new LabelEditor({ data: original.slice(), shape, step, fullShape: shape }, voxel);
  const editor = open(), failures = [];
  const sizes = () => {
    const counts = new Map();
    for (const id of editor.labels.data) if (id) counts.set(id, (counts.get(id) ?? 0) + 1);
    return counts;
  };
  const total = counts => [...counts.values()].reduce((sum, count) => sum + count, 0);
  const randomVoxel = () => [random(9), random(20), random(24)];
  const voxelsOf = id => {
    const voxels = [];
    editor.labels.data.forEach((label, p) => label === id && voxels.push([Math.floor(p / 480), Math.floor(p / 24) % 20, p % 24]));
    return voxels;
  };
  const outline = () => {
    const [v, u, r] = [random(20), random(24), 2 + random(6)];
    return Array.from({ length: 9 }, (_, k) => [v + r * Math.cos(k * 0.7), u + r * Math.sin(k * 0.7)]);
  };
  const expectations = {
    merge: (before, after) => total(before) === total(after) && after.size === before.size - 1,
    split: (before, after) => total(before) === total(after) && after.size === before.size + 1,
    delete: (before, after) => after.size === before.size - 1 && total(after) < total(before),
    add: (before, after) => [...before].every(([id, voxels]) => after.get(id) === voxels || id === editor.sketch.id),
    paint: (before, after) => total(after) >= total(before),
    erase: (before, after) => total(after) < total(before),
  };
  const usedIds = new Set(sizes().keys());
  const corrections = {
    merge: ids => editor.merge(pick(ids), pick(ids)),
    cut: ids => editor.cut(pick(ids), random(3), [random(20), random(24)], [random(20), random(24)]),
    split: ids => {
      const { sketch } = editor;
      if (sketch?.kind === "split") return editor.split(sketch.ids, [...sketch.seeds, pick(voxelsOf(pick(sketch.ids)))]);
      const id = pick(ids), own = voxelsOf(id);
      return editor.split([id], [pick(own), pick(own)]);
    },
    remove: ids => (ids.length > 4 ? editor.remove(pick(ids)) : null),
    outline: () => {
      const drawing = editor.sketch?.kind === "add" ? editor.sketch : null, axis = drawing?.axis ?? random(3);
      return editor.outline(axis, random(shape[axis]), outline(), drawing);
    },
    stamp: ids => {
      const erase = random(2) === 1, axis = [null, 0, 1, 2][random(4)];
      const id = random(3) ? pick(ids) : editor.startObject();
      for (let stamp = 0; stamp < 3; stamp++) editor.stamp(randomVoxel(), 0.3 + random(30) / 10, { id, erase, axis, overwrite: random(3) === 0 });
      return editor.commit(erase ? "erase" : "paint");
    },
  };
  for (let turn = 0; turn < steps; turn++) {
    if (random(5) === 0) {
      const current = editor.labels.data.slice();
      const count = 1 + random(4);
      let undone = 0;
      while (undone < count && editor.undo()) undone += 1;
      for (let redone = 0; redone < undone; redone++) editor.redo();
      if (String(current) !== String(editor.labels.data)) failures.push(`${turn}: labels differ after undo and redo`);
    }
    const before = sizes(), [name, correct] = pick(Object.entries(corrections));
    let edit = null;
    const unchanged = String(editor.labels.data);
    try {
      edit = correct([...before.keys()]);
    } catch (error) {
      if (!(error instanceof CannotEdit)) throw error;
      if (String(editor.labels.data) !== unchanged) failures.push(`${turn}: ${name} was rejected but changed labels`);
    }
    const after = sizes();
    if (edit && !expectations[edit.kind](before, after)) failures.push(`${turn}: ${name} had an unexpected effect`);
    for (const id of after.keys()) {
      if (!before.has(id) && usedIds.has(id)) failures.push(`${turn}: ${name} reused an id`);
      usedIds.add(id);
    }
    if (edit?.kind === "split") {
      const parts = edit.sketch?.ids ?? [edit.runs[2], edit.runs[3]];
      if (parts.some((first, k) => parts.slice(k + 1).some(second => haveSimilarColors(first, second)))) failures.push(`${turn}: parts have similar colors`);
    }
    const counted = new Map([...editor.objects].map(([id, { voxels }]) => [id, voxels]));
    if (counted.size !== after.size || [...after].some(([id, voxels]) => counted.get(id) !== voxels)) failures.push(`${turn}: wrong voxel counts after ${name}`);
  }
  const final = editor.labels.data.slice(), edits = [...editor.done];
  const restored = open();
  if (!restored.restore(structuredClone(edits)) || String(restored.labels.data) !== String(final)) failures.push("corrections were not restored");
  const other = open();
  other.labels.data[edits[0].runs[0]] ^= 1;
  const unchanged = String(other.labels.data);
  if (other.restore(edits) || String(other.labels.data) !== unchanged) failures.push("corrections were restored on other labels");
  while (editor.undo());
  if (String(editor.labels.data) !== String(original)) failures.push("undo did not restore the original labels");
  while (editor.redo());
  if (String(editor.labels.data) !== String(final)) failures.push("redo did not restore the corrected labels");
  return { failures, kinds: [...new Set(edits.map(edit => edit.kind))].sort(), edits: edits.length };
}
