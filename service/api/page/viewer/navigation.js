/** Navigation in slice views with the wheel, pointers and keys. */

import { listenForUse } from "./key_forwarding.js";
import { getKeyAction } from "./shortcuts.js";
import { createPlaneCounter, getZoomFactor } from "./wheel.js";

/** @typedef {import("./slice_view.js").SliceView} SliceView */
/** @typedef {import("./viewer.js").Viewer} Viewer */
/** @typedef {import("./scene.js").Triple} Triple */

/** Largest movement of the pointer that still counts as a click. */
const MAX_CLICK_MOVEMENT_PIXELS = 4;

/** Connect the wheel, pointers and keys of a view to the viewer. @param {Viewer} viewer @param {SliceView} view */
export function listenToView(viewer, view) {
  const { stage, slider, axis } = view;
  const countPlanes = createPlaneCounter();
  slider.addEventListener("input", () => viewer.move(axis, Number(slider.value) - viewer.scene.state.position[axis]));
  stage.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      if (event.ctrlKey || event.metaKey)
        viewer.zoomBy(getZoomFactor(event), view.voxelAt(event.offsetX, event.offsetY));
      else viewer.move(axis, countPlanes(event));
    },
    { passive: false },
  );
  stage.addEventListener("dblclick", () => viewer.fit());
  stage.addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : getKeyAction(event.key, viewer, view);
    if (action === undefined) return;
    event.preventDefault();
    action();
  });
  listenToPointers(viewer, view);
  listenForUse(stage);
}

/** Let one pointer drag the stack, two pointers zoom, and a click select an object. @param {Viewer} viewer @param {SliceView} view */
function listenToPointers(viewer, view) {
  const { stage } = view;
  /** @type {Map<number, [number, number]>} */
  const pointers = new Map();
  let movedPixels = 0;
  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    stage.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    if (pointers.size === 1) movedPixels = 0;
  });
  stage.addEventListener("pointermove", (event) => {
    const previousPosition = pointers.get(event.pointerId);
    if (!previousPosition) return;
    const previousDistance = computePointerDistance(pointers);
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    const [dx, dy] = [event.clientX - previousPosition[0], event.clientY - previousPosition[1]];
    movedPixels += Math.hypot(dx, dy);
    if (pointers.size === 2) viewer.zoomBy(computePointerDistance(pointers) / Math.max(previousDistance, 1));
    else if (movedPixels > MAX_CLICK_MOVEMENT_PIXELS) pan(viewer, view, dx, dy);
  });
  stage.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  stage.addEventListener("pointerup", (event) => {
    const isOnlyPointer = pointers.size === 1 && pointers.has(event.pointerId);
    pointers.delete(event.pointerId);
    if (!isOnlyPointer || movedPixels > MAX_CLICK_MOVEMENT_PIXELS) return;
    const bounds = stage.getBoundingClientRect();
    viewer.pick(view.voxelAt(event.clientX - bounds.left, event.clientY - bounds.top));
  });
}

/** Move the displayed part of the stack. @param {Viewer} viewer @param {SliceView} view @param {number} dx @param {number} dy movement of the pointer in pixels */
function pan({ scene }, view, dx, dy) {
  const placement = view.getPlacement();
  const center = /** @type {Triple} */ ([...scene.state.center]);
  center[view.axis === 2 ? 0 : 2] -= dx / placement.scaleX;
  center[view.axis === 1 ? 0 : 1] -= dy / placement.scaleY;
  scene.set({ center });
}

/** @param {Map<number, [number, number]>} pointers @returns {number} the distance between two pointers in pixels, 0 if there is only one pointer */
function computePointerDistance(pointers) {
  const [first, second] = [...pointers.values()];
  return second ? Math.hypot(first[0] - second[0], first[1] - second[1]) : 0;
}
