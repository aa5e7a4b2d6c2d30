// Shows a synthetic stack [depth, edge, edge] with a number of objects and their table, without a job on the service.
async ([objectCount, depth, edge]) => {
  const { Viewer } = await import("/page/viewer/viewer.js");
  const { ObjectsView } = await import("/page/result/objects_view.js");
  const shape = [depth, edge, edge], step = [1, 1, 1];
  const image = new Uint16Array(depth * edge * edge), labels = new Uint16Array(image.length);
  const objectsPerSide = Math.ceil(Math.sqrt(objectCount)), cellEdge = edge / objectsPerSide;
  const names = "label,num_pixels,area,equivalent_diameter_area,bbox-0,bbox-1,bbox-2,bbox-3,bbox-4,bbox-5,intensity_mean,";
  const rows = [names + "touching_border,mean_probability,confidence,unit"];
  for (let id = 1; id <= objectCount; id++) {
    const y = Math.floor((id - 1) / objectsPerSide) * cellEdge, x = ((id - 1) % objectsPerSide) * cellEdge;
    rows.push(`${id},100,${id % 97},${id % 13},0,${y},${x},${depth},${y + cellEdge},${x + cellEdge},${id % 251},False,${(id % 89) / 89},${(id % 83) / 83},um`);
  }
  for (let p = 0; p < image.length; p++) {
    const x = p % edge, y = Math.floor(p / edge) % edge;
    const isInside = x % cellEdge > 1 && y % cellEdge > 1;
    image[p] = isInside ? 900 + (p * 7919) % 100 : (p * 104729) % 100;
    labels[p] = isInside ? Math.min(objectCount, Math.floor(y / cellEdge) * objectsPerSide + Math.floor(x / cellEdge) + 1) : 0;
  }
  document.getElementById("start").hidden = true;
  document.getElementById("work").hidden = false;
  const viewer = new Viewer(document.getElementById("viewer"));
  viewer.open({ data: image, shape, step, fullShape: shape }, { z: 1, y: 1, x: 1 });
  viewer.adjustContrast();
  viewer.setLabels({ data: labels, shape, step, fullShape: shape });
  const { parseTable } = await import("/page/volumes/object_table.js");
  const objectsView = new ObjectsView(parseTable(rows.join("\n")));
  document.getElementById("side").replaceChildren(objectsView.root);
  objectsView.addEventListener("filter", () => viewer.scene.set({ hiddenFlags: objectsView.hiddenFlags }));
  objectsView.addEventListener("select", event => viewer.select(event.detail, objectsView.getCenter(event.detail)));
}
