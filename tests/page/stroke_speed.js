// Measures the frames of a stroke and of undo in the views of a stack of 64 x 512 x 512 voxels with 2,000 objects. Returns
// the lowest deciles in milliseconds, since other processes only lengthen frames. A frame includes changing the labels and
// drawing all views.
async createLabels => {
  const { Viewer } = await import("/page/viewer/viewer.js");
  const { CorrectView } = await import("/page/correct/correct_view.js");
  const shape = [64, 512, 512];
  const createVolume = data => ({ data, shape, step: [1, 1, 1], fullShape: shape });
  const labels = createLabels();
  document.getElementById("start").hidden = true;
  document.getElementById("work").hidden = false;
  const waitForFrame = () => new Promise(done => requestAnimationFrame(done));
  const viewer = new Viewer(document.getElementById("viewer"));
  viewer.open(createVolume(labels.map(label => 7 * (label % 90))), { z: 1, y: 0.5, x: 0.5 });
  viewer.adjustContrast();
  await waitForFrame();
  await waitForFrame();
  const source = {
    id: "speed", isEmpty: false, isSeries: false, model: "", startJob: null, getProperties: () => createVolume(labels),
    fetch: async () => createVolume(labels), getConfidences: () => new Map(), getQuery: () => ({}), getFragment: () => "",
  };
  const view = new CorrectView(source, "", viewer, 0, { corrections: true }, new AbortController().signal);
  await view.enter();
  const { tools } = view.panel;
  tools.region.set({ kind: "box", box: { low: [4, 40, 40], high: [60, 480, 480] } });
  tools.activate("paint");
  const measure = async action => {
    await waitForFrame();
    const start = performance.now();
    action();
    viewer.drawNow();
    return performance.now() - start;
  };
  const durations = { stroke: [], undo: [] };
  for (let stroke = 0; stroke < 5; stroke++) {
    tools.brush.startStroke(viewer.views[0], [32, 60 + 60 * stroke, 80], false);
    for (let k = 1; k < 12; k++)
      durations.stroke.push(await measure(() => tools.brush.paintTo([32, 60 + 60 * stroke + k, 80 + 6 * k])));
    tools.cancel();
  }
  const editCount = tools.editor.edits.length;
  for (let k = 0; k < 5; k++) durations.undo.push(await measure(() => tools.undo()));
  if (viewer.views.some(({ width, height }) => width * height < 10_000)) throw new Error("the views are not visible");
  const takeDecile = values => values.sort((a, b) => a - b)[Math.floor(values.length / 10)];
  return { stroke: takeDecile(durations.stroke), undo: takeDecile(durations.undo), edits: editCount };
}
