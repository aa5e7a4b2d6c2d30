/** Camera of the 3D view: its rotation and zoom, the box that the stack fills, and the rays through the stack. This module does not use the DOM. */

/** @typedef {import("./scene.js").SceneState} SceneState */
/** @typedef {import("./scene.js").Triple} Triple */
/** @typedef {[number, number, number]} Point coordinates x, y, z; the longest edge of the box is 2, and its center is at 0 */

/** Half the height of the visible part of the world at zoom 1. */
const HALF_HEIGHT = 1.5;
/** Distance of the start of a ray from the center of the box. */
const START_DISTANCE = 4;
const [MIN_ZOOM, MAX_ZOOM] = [0.4, 12];

/** Orthographic camera. */
export class Camera {
  constructor() {
    /** Angles of rotation to the right and down, in radians. */
    this.angles = [0.6, -0.5];
    this.zoom = 1;
    /** Half the size of the box. @type {Point} */
    this.box = [1, 1, 1];
    /** Length of the longest edge of the box in micrometers, or in voxels. */
    this.extent = 1;
    /** Axis along which the box is cut open, 0 for x, and the fraction that is removed. */
    this.cut = { axis: 2, fraction: 0 };
  }

  /** Fit the box to a stack. @param {number[]} extents size of the stack along x, y and z */
  setExtents(extents) {
    this.extent = Math.max(...extents);
    this.box = /** @type {Point} */ (extents.map((length) => length / this.extent));
  }

  /** @param {number} right @param {number} down angles in radians */
  rotate(right, down) {
    this.angles[0] += right;
    this.angles[1] = Math.max(-Math.PI / 2, Math.min(Math.PI / 2, this.angles[1] + down));
  }

  /** @param {number} factor */
  zoomBy(factor) {
    this.zoom = Math.max(MIN_ZOOM, Math.min(MAX_ZOOM, this.zoom * factor));
  }

  /** The directions to the right, up and toward the user in coordinates of the stack. @returns {[Point, Point, Point]} */
  get directions() {
    const [right, down] = this.angles;
    const [cosRight, sinRight, cosDown, sinDown] = [Math.cos(right), Math.sin(right), Math.cos(down), Math.sin(down)];
    // The y axis points down in the stack and up on the screen.
    return [
      [cosRight, 0, sinRight],
      [-sinRight * sinDown, -cosDown, cosRight * sinDown],
      [sinRight * cosDown, -sinDown, -cosRight * cosDown],
    ];
  }

  /** Return the corners of the part of the box that is drawn. The cut removes the part that faces the user. @returns {{low: Point, high: Point}} */
  get limits() {
    const { box, cut } = this;
    const low = /** @type {Point} */ (box.map((half) => -half));
    const high = /** @type {Point} */ ([...box]);
    const removedLength = 2 * box[cut.axis] * cut.fraction;
    if (this.directions[2][cut.axis] > 0) high[cut.axis] -= removedLength;
    else low[cut.axis] += removedLength;
    return { low, high };
  }

  /** Return half the size of the visible part of the world. @param {number} width @param {number} height of the view in pixels @returns {[number, number]} */
  getWindow(width, height) {
    const size = Math.min(width, height) * this.zoom;
    return [(HALF_HEIGHT * width) / size, (HALF_HEIGHT * height) / size];
  }

  /** Return the number of pixels per micrometer, or per voxel. @param {number} width @param {number} height of the view in pixels */
  getScale(width, height) {
    return width / this.getWindow(width, height)[0] / this.extent;
  }

  /** Project a point to the view. @param {Point} point @param {number} width @param {number} height of the view in pixels @returns {[number, number]} horizontal and vertical position in pixels */
  project(point, width, height) {
    const [halfWidth, halfHeight] = this.getWindow(width, height);
    const [right, up] = this.directions.map((direction) =>
      direction.reduce((sum, component, axis) => sum + component * point[axis], 0),
    );
    return [(width / 2) * (1 + right / halfWidth), (height / 2) * (1 - up / halfHeight)];
  }

  /**
   * Return the voxels on the ray through a pixel, nearest first.
   * @param {number} x @param {number} y position in pixels @param {number} width @param {number} height of the view in pixels @param {Triple} shape of the stack
   * @returns {Triple[]}
   */
  listVoxelsOnRay(x, y, width, height, shape) {
    const [halfWidth, halfHeight] = this.getWindow(width, height);
    const [right, up, toward] = this.directions;
    const offset = [((2 * x) / width - 1) * halfWidth, (1 - (2 * y) / height) * halfHeight, START_DISTANCE];
    const start = [0, 1, 2].map((axis) => right[axis] * offset[0] + up[axis] * offset[1] + toward[axis] * offset[2]);
    const { low, high } = this.limits;
    const bounds = [0, 1, 2].map((axis) =>
      [low[axis], high[axis]]
        .map((plane) => (plane - start[axis]) / -toward[axis])
        .sort((first, second) => first - second),
    );
    const entry = Math.max(...bounds.map(([first]) => first));
    const exit = Math.min(...bounds.map(([, last]) => last));
    const [columns, rows, planes] = [shape[2], shape[1], shape[0]];
    const step = Math.min(...[columns, rows, planes].map((length, axis) => this.box[axis] / length));
    /** @type {Triple[]} */
    const voxels = [];
    for (let distance = entry + step / 2; distance < exit; distance += step) {
      const [u, v, w] = [columns, rows, planes].map((length, axis) =>
        Math.floor((((start[axis] - distance * toward[axis]) / this.box[axis] + 1) / 2) * length),
      );
      if (u >= 0 && v >= 0 && w >= 0 && u < columns && v < rows && w < planes) voxels.push([w, v, u]);
    }
    return voxels;
  }
}
