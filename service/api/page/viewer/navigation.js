/** Moving about in a slice view with the wheel, pointers and keys. */

/** @typedef {import("./slice_view.js").SliceView} SliceView */
/** @typedef {import("./viewer.js").Viewer} Viewer */
/** @typedef {import("./scene.js").Triple} Triple */

const CLICK_PIXELS = 4;
const BUTTON_ZOOM = 1.4;
const WHEEL_ZOOM = 1.2;
const PAGE_PLANES = 10;

/** @param {Viewer} viewer @param {SliceView} view of it */
export function listenToView(viewer, view) {
  const { stage, slider, axis } = view;
  slider.addEventListener("input", () => viewer.move(axis, Number(slider.value) - viewer.scene.state.at[axis]));
  stage.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const sign = Math.sign(event.deltaY || event.deltaX);
      if (event.ctrlKey || event.metaKey)
        viewer.zoomBy(sign < 0 ? WHEEL_ZOOM : 1 / WHEEL_ZOOM, view.voxelAt(event.offsetX, event.offsetY));
      else viewer.move(axis, sign);
    },
    { passive: false },
  );
  stage.addEventListener("dblclick", () => viewer.fit());
  stage.addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : actionOf(event.key, viewer, view);
    if (action === undefined) return;
    event.preventDefault();
    action();
  });
  listenToPointers(viewer, view);
}

/** One pointer drags the stack, two zoom, and one that has not moved selects. @param {Viewer} viewer @param {SliceView} view */
function listenToPointers(viewer, view) {
  const { stage } = view;
  /** @type {Map<number, [number, number]>} */
  const pointers = new Map();
  let moved = 0;
  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    stage.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    if (pointers.size === 1) moved = 0;
  });
  stage.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const spread = apart(pointers);
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    const [dx, dy] = [event.clientX - before[0], event.clientY - before[1]];
    moved += Math.hypot(dx, dy);
    if (pointers.size === 2) viewer.zoomBy(apart(pointers) / Math.max(spread, 1));
    else if (moved > CLICK_PIXELS) pan(viewer, view, dx, dy);
  });
  stage.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  stage.addEventListener("pointerup", (event) => {
    const alone = pointers.size === 1 && pointers.has(event.pointerId);
    pointers.delete(event.pointerId);
    if (!alone || moved > CLICK_PIXELS) return;
    const bounds = stage.getBoundingClientRect();
    viewer.pick(view.voxelAt(event.clientX - bounds.left, event.clientY - bounds.top));
  });
}

/** @param {Viewer} viewer @param {SliceView} view @param {number} dx @param {number} dy pixels */
function pan({ scene }, view, dx, dy) {
  const place = view.placement();
  const centre = /** @type {Triple} */ ([...scene.state.centre]);
  centre[view.axis === 2 ? 0 : 2] -= dx / place.scaleX;
  centre[view.axis === 1 ? 0 : 1] -= dy / place.scaleY;
  scene.set({ centre });
}

/** @param {string} key @param {Viewer} viewer @param {SliceView} view that has the focus @returns {(() => void) | undefined} */
function actionOf(key, viewer, { axis }) {
  const { scene } = viewer;
  return {
    j: () => viewer.move(axis, 1),
    k: () => viewer.move(axis, -1),
    ArrowDown: () => viewer.move(axis, 1),
    ArrowUp: () => viewer.move(axis, -1),
    ArrowRight: () => viewer.move(axis, 1),
    ArrowLeft: () => viewer.move(axis, -1),
    PageDown: () => viewer.move(axis, PAGE_PLANES),
    PageUp: () => viewer.move(axis, -PAGE_PLANES),
    Home: () => viewer.move(axis, -Infinity),
    End: () => viewer.move(axis, Infinity),
    "+": () => viewer.zoomBy(BUTTON_ZOOM),
    "-": () => viewer.zoomBy(1 / BUTTON_ZOOM),
    0: () => viewer.fit(),
    f: () => scene.set({ filled: !scene.state.filled }),
    o: () => scene.set({ shown: !scene.state.shown }),
    Escape: () => viewer.choose(0),
  }[key];
}

/** @param {Map<number, [number, number]>} pointers */
function apart(pointers) {
  const [one, other] = [...pointers.values()];
  return other ? Math.hypot(one[0] - other[0], one[1] - other[1]) : 0;
}
