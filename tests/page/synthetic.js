// Shows a synthetic stack [depth, edge, edge] and its table with a number of objects, without a job on the service.
async ([objects, depth, edge]) => {
  const { Viewer } = await import("/page/viewer/viewer.js");
  const { ObjectsView } = await import("/page/result/objects_view.js");
  const shape = [depth, edge, edge], step = [1, 1, 1];
  const image = new Uint16Array(depth * edge * edge), labels = new Uint16Array(image.length);
  const side = Math.ceil(Math.sqrt(objects)), cell = edge / side;
  const names = "label,num_pixels,area,equivalent_diameter_area,bbox-0,bbox-1,bbox-2,bbox-3,bbox-4,bbox-5,intensity_mean,";
  const rows = [names + "touching_border,unit"];
  for (let id = 1; id <= objects; id++) {
    const y = Math.floor((id - 1) / side) * cell, x = ((id - 1) % side) * cell;
    rows.push(`${id},100,${id % 97},${id % 13},0,${y},${x},${depth},${y + cell},${x + cell},${id % 251},False,um`);
  }
  for (let p = 0; p < image.length; p++) {
    const x = p % edge, y = Math.floor(p / edge) % edge;
    const inside = x % cell > 1 && y % cell > 1;
    image[p] = inside ? 900 + (p * 7919) % 100 : (p * 104729) % 100;
    labels[p] = inside ? Math.min(objects, Math.floor(y / cell) * side + Math.floor(x / cell) + 1) : 0;
  }
  document.getElementById("start").hidden = true;
  document.getElementById("work").hidden = false;
  const viewer = new Viewer(document.getElementById("viewer"));
  viewer.open({ data: image, shape, step, fullShape: shape }, { z: 1, y: 1, x: 1 });
  viewer.adjustContrast();
  viewer.setLabels({ data: labels, shape, step, fullShape: shape });
  const { parseTable } = await import("/page/volumes/object_table.js");
  const table = new ObjectsView(parseTable(rows.join("\n")));
  document.getElementById("side").replaceChildren(table.root);
  table.addEventListener("select", event => viewer.select(event.detail, table.center(event.detail)));
}
