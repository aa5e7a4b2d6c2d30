/** Keyboard shortcuts of the slice views, apart from those of the correction tools. */

/** @typedef {import("./slice_view.js").SliceView} SliceView */
/** @typedef {import("./viewer.js").Viewer} Viewer */

const PLANES_PER_PAGE_KEY = 10;
const KEY_ZOOM_FACTOR = 1.4;

/** @param {string} key @param {Viewer} viewer @param {SliceView} view the focused view @returns {(() => void) | undefined} */
export function getKeyAction(key, viewer, { axis }) {
  const { scene } = viewer;
  return {
    j: () => viewer.move(axis, 1),
    k: () => viewer.move(axis, -1),
    ArrowDown: () => viewer.move(axis, 1),
    ArrowUp: () => viewer.move(axis, -1),
    ArrowRight: () => viewer.move(axis, 1),
    ArrowLeft: () => viewer.move(axis, -1),
    PageDown: () => viewer.move(axis, PLANES_PER_PAGE_KEY),
    PageUp: () => viewer.move(axis, -PLANES_PER_PAGE_KEY),
    Home: () => viewer.move(axis, -Infinity),
    End: () => viewer.move(axis, Infinity),
    "+": () => viewer.zoomBy(KEY_ZOOM_FACTOR),
    "-": () => viewer.zoomBy(1 / KEY_ZOOM_FACTOR),
    0: () => viewer.fit(),
    f: () => scene.set({ fillObjects: !scene.state.fillObjects }),
    o: () => scene.set({ showObjects: !scene.state.showObjects }),
    Escape: () => viewer.selectAndNotify(0),
  }[key];
}
