/** Interpretation of wheel events: notches of a mouse wheel, and small steps of a trackpad. */

/** Distance that moves by one plane. A notch of a mouse wheel is longer. */
const PIXELS_PER_PLANE = 40;
/** Browsers that report a notch of the wheel in lines report three of them. */
const PIXELS_PER_LINE = 100 / 3;
/** The first event after a pause of this length always moves by one plane, however small its step is. */
const PAUSE_MILLISECONDS = 200;
const MAX_ZOOM_FACTOR = 1.2;
const LOG_ZOOM_PER_PIXEL = Math.log(MAX_ZOOM_FACTOR) / 100;
/** Trackpads report a pinch as a wheel event with the Ctrl key and with short distances. */
const LOG_ZOOM_PER_PINCHED_PIXEL = 0.01;

/** @typedef {Pick<WheelEvent, "deltaX" | "deltaY" | "deltaMode" | "timeStamp">} Turn */

/** @param {Omit<Turn, "timeStamp">} event @returns {number} distance in pixels along the axis with the larger distance */
function getDistance({ deltaX, deltaY, deltaMode }) {
  const distance = Math.abs(deltaY) >= Math.abs(deltaX) ? deltaY : deltaX;
  return deltaMode === 0 ? distance : distance * PIXELS_PER_LINE;
}

/** @returns {(event: Turn) => number} function that returns the number of planes to move by: -1, 0 or 1. A notch of a mouse wheel is one plane, and the steps of a trackpad are added up. */
export function createPlaneCounter() {
  let lastTime = Number.NEGATIVE_INFINITY;
  let sum = 0;
  return (event) => {
    const distance = getDistance(event);
    const isFirst = event.timeStamp - lastTime > PAUSE_MILLISECONDS;
    lastTime = event.timeStamp;
    sum = isFirst || Math.sign(distance) !== Math.sign(sum) ? distance : sum + distance;
    if (!isFirst && Math.abs(sum) < PIXELS_PER_PLANE) return 0;
    sum %= PIXELS_PER_PLANE;
    return Math.sign(distance);
  };
}

/** @param {Pick<WheelEvent, "deltaX" | "deltaY" | "deltaMode" | "ctrlKey">} event @returns {number} factor that is proportional to the distance on a trackpad, and constant for notches of a mouse wheel */
export function getZoomFactor(event) {
  const speed = event.ctrlKey ? LOG_ZOOM_PER_PINCHED_PIXEL : LOG_ZOOM_PER_PIXEL;
  const factor = Math.exp(-getDistance(event) * speed);
  return Math.min(MAX_ZOOM_FACTOR, Math.max(1 / MAX_ZOOM_FACTOR, factor));
}
