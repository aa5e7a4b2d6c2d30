// Random corrections of random labels, and what must hold of them: the list of what does not.
async ([seed, steps]) => {
  const { LabelEditor, CannotEdit } = await import("/page/volumes/label_edit.js");
  const { lookAlike } = await import("/page/volumes/slices.js");
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
  const open = () => new LabelEditor({ data: original.slice(), shape, step, whole: shape }, voxel);
  const editor = open(), wrong = [];
  const sizes = () => {
    const found = new Map();
    for (const id of editor.labels.data) if (id) found.set(id, (found.get(id) ?? 0) + 1);
    return found;
  };
  const total = found => [...found.values()].reduce((sum, one) => sum + one, 0);
  const place = () => [random(9), random(20), random(24)];
  const voxels = id => {
    const found = [];
    editor.labels.data.forEach((one, p) => one === id && found.push([Math.floor(p / 480), Math.floor(p / 24) % 20, p % 24]));
    return found;
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
  const ever = new Set(sizes().keys());
  const works = {
    merge: ids => editor.merge(pick(ids), pick(ids)),
    cut: ids => editor.cut(pick(ids), random(3), [random(20), random(24)], [random(20), random(24)]),
    split: ids => {
      const { sketch } = editor;
      if (sketch?.kind === "split") return editor.split(sketch.ids, [...sketch.seeds, pick(voxels(pick(sketch.ids)))]);
      const id = pick(ids), own = voxels(id);
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
      for (let stamp = 0; stamp < 3; stamp++) editor.stamp(place(), 0.3 + random(30) / 10, { id, erase, axis, over: random(3) === 0 });
      return editor.commit(erase ? "erase" : "paint");
    },
  };
  for (let turn = 0; turn < steps; turn++) {
    if (random(5) === 0) {
      const now = editor.labels.data.slice();
      const back = 1 + random(4);
      let undone = 0;
      while (undone < back && editor.undo()) undone += 1;
      for (let again = 0; again < undone; again++) editor.redo();
      if (String(now) !== String(editor.labels.data)) wrong.push(`${turn}: undone and done again, the labels differ`);
    }
    const before = sizes(), [name, work] = pick(Object.entries(works));
    let edit = null;
    const untouched = String(editor.labels.data);
    try {
      edit = work([...before.keys()]);
    } catch (error) {
      if (!(error instanceof CannotEdit)) throw error;
      if (String(editor.labels.data) !== untouched) wrong.push(`${turn}: ${name} refused, and changed labels`);
    }
    const after = sizes();
    if (edit && !expectations[edit.kind](before, after)) wrong.push(`${turn}: ${name} did not do what it is for`);
    for (const id of after.keys()) {
      if (!before.has(id) && ever.has(id)) wrong.push(`${turn}: ${name} gave an id a second time`);
      ever.add(id);
    }
    if (edit?.kind === "split") {
      const parts = edit.sketch?.ids ?? [edit.runs[2], edit.runs[3]];
      if (parts.some((one, k) => parts.slice(k + 1).some(two => lookAlike(one, two)))) wrong.push(`${turn}: parts look alike`);
    }
    const told = new Map([...editor.objects].map(([id, { voxels }]) => [id, voxels]));
    if (told.size !== after.size || [...after].some(([id, voxels]) => told.get(id) !== voxels)) wrong.push(`${turn}: ${name} counted wrongly`);
  }
  const final = editor.labels.data.slice(), edits = [...editor.done];
  const again = open();
  if (!again.restore(structuredClone(edits)) || String(again.labels.data) !== String(final)) wrong.push("not restored");
  const other = open();
  other.labels.data[edits[0].runs[0]] ^= 1;
  const touched = String(other.labels.data);
  if (other.restore(edits) || String(other.labels.data) !== touched) wrong.push("restored on other labels");
  while (editor.undo());
  if (String(editor.labels.data) !== String(original)) wrong.push("undo does not give back the labels");
  while (editor.redo());
  if (String(editor.labels.data) !== String(final)) wrong.push("redo does not give the labels");
  return { wrong, kinds: [...new Set(edits.map(edit => edit.kind))].sort(), edits: edits.length };
}
