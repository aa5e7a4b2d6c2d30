/** Rotatable 3D rendering of the objects or of the maximum intensity, by ray casting with WebGL 2. */

import { COLORS, getColorIndex } from "../volumes/label_colors.js";

/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("./scene.js").Scene} Scene */

/** Maximum size of a texture. Larger volumes are subsampled. */
const MAX_TEXTURE_VOXELS = 6_000_000;
/** Width of the texture with the colors of the objects. */
const COLORS_PER_ROW = 2048;
/** Width of the edges of the box in pixels. */
const LINE_PIXELS = 1.3;
const VERTEX_SHADER_SOURCE = `#version 300 es
in vec2 corner; out vec2 screenPosition;
void main() { screenPosition = corner; gl_Position = vec4(corner, 0.0, 1.0); }`;

// The stack fills a box that is centered at the origin and whose longest edge is 2. `rotation` converts screen
// directions to stack directions. The part of the box between `low` and `high` is drawn, with lines along its edges.
const FRAGMENT_SHADER_SOURCE = `#version 300 es
precision highp float; precision highp int; precision highp sampler3D; precision highp usampler3D;
in vec2 screenPosition; out vec4 color;
uniform sampler3D gray, mask; uniform usampler3D ids; uniform sampler2D colors;
uniform mat3 rotation; uniform vec3 box, low, high; uniform vec2 window; uniform float lineWidth;
uniform bool showObjects; uniform uint selectedId;
const int STEPS = 320;
vec3 toTexture(vec3 p) { return p / box * 0.5 + 0.5; }
float sampleMask(vec3 p) { return texture(mask, toTexture(p)).r; }
// The three edges that meet at the first voxel have the colors of their axes.
vec4 colorOfEdge(vec3 p) {
  bvec3 isLow = lessThan(p - low, vec3(lineWidth)), isHigh = lessThan(high - p, vec3(lineWidth));
  bvec3 isAtFace = bvec3(isLow.x || isHigh.x, isLow.y || isHigh.y, isLow.z || isHigh.z);
  if (int(isAtFace.x) + int(isAtFace.y) + int(isAtFace.z) < 2) return vec4(0.0);
  if (isLow.y && isLow.z) return vec4(1.0, 0.42, 0.42, 0.9);
  if (isLow.x && isLow.z) return vec4(0.45, 0.85, 0.45, 0.9);
  if (isLow.x && isLow.y) return vec4(0.5, 0.65, 1.0, 0.9);
  return vec4(0.6, 0.6, 0.6, 0.55);
}
vec3 blend(vec3 below, vec4 above) { return mix(below, above.rgb, above.a); }
// Searches the first object on the ray. Returns its color, with an opacity of 0 if there is none.
vec4 findObject(vec3 start, vec3 ray, float t, float end) {
  float stepLength = 3.5 / float(STEPS);
  vec3 voxelSize = 2.0 * box / vec3(textureSize(mask, 0));
  for (int n = 0; n < STEPS && t < end; n++, t += stepLength) {
    if (sampleMask(start + t * ray) < 0.5) continue;
    // The first sample lies on a face of the box, which cuts the object.
    float near = n == 0 ? t : t - stepLength, far = t;
    for (int iteration = 0; iteration < 5; iteration++) {
      float middle = 0.5 * (near + far);
      if (sampleMask(start + middle * ray) < 0.5) near = middle; else far = middle;
    }
    vec3 p = start + far * ray, e = voxelSize * 1.2;
    vec3 gradient = vec3(sampleMask(p + vec3(e.x, 0, 0)) - sampleMask(p - vec3(e.x, 0, 0)),
      sampleMask(p + vec3(0, e.y, 0)) - sampleMask(p - vec3(0, e.y, 0)), sampleMask(p + vec3(0, 0, e.z)) - sampleMask(p - vec3(0, 0, e.z))) / e;
    float light = n > 0 && length(gradient) > 0.0 ? max(dot(normalize(gradient), ray), 0.0) : 0.9;
    uint id = 0u; vec4 objectColor = vec4(0.0);
    for (int attempt = 0; attempt < 4 && objectColor.a == 0.0; attempt++) {
      ivec3 cell = ivec3(toTexture(p + float(attempt) * 0.5 * voxelSize * ray) * vec3(textureSize(ids, 0)));
      id = texelFetch(ids, clamp(cell, ivec3(0), textureSize(ids, 0) - 1), 0).r;
      int width = textureSize(colors, 0).x;
      if (id != 0u) objectColor = texelFetch(colors, ivec2(int(id) % width, int(id) / width), 0);
    }
    if (objectColor.a == 0.0) continue;
    if (id == selectedId && id != 0u) objectColor.rgb = vec3(1.0);
    float fog = 1.0 - 0.45 * smoothstep(2.6, 5.6, far);
    return vec4(objectColor.rgb * (0.25 + 0.75 * light) * fog, 1.0);
  }
  return vec4(0.0);
}
float findMaximum(vec3 start, vec3 ray, float t, float end) {
  float stepLength = 3.5 / float(STEPS), maximum = 0.0;
  for (int n = 0; n < STEPS && t < end; n++, t += stepLength)
    maximum = max(maximum, texture(gray, toTexture(start + t * ray)).r);
  return maximum;
}
void main() {
  vec3 ray = rotation * vec3(0.0, 0.0, -1.0), start = rotation * vec3(screenPosition * window, 4.0);
  vec3 first = (low - start) / ray, last = (high - start) / ray;
  vec3 entries = min(first, last), exits = max(first, last);
  float t = max(max(entries.x, entries.y), entries.z), end = min(min(exits.x, exits.y), exits.z);
  vec3 pixel = vec3(0.027, 0.035, 0.043);
  if (t < end) {
    pixel = blend(pixel, colorOfEdge(start + end * ray));
    if (showObjects) pixel = blend(pixel, findObject(start, ray, t, end));
    else pixel += vec3(findMaximum(start, ray, t, end));
    pixel = blend(pixel, colorOfEdge(start + t * ray));
  }
  color = vec4(pixel, 1.0);
}`;

/** Renderer that draws the scene on a canvas. */
export class VolumeRenderer {
  /** @param {HTMLCanvasElement} canvas @param {Scene} scene @param {import("./camera.js").Camera} camera */
  constructor(canvas, scene, camera) {
    this.canvas = canvas;
    this.scene = scene;
    this.camera = camera;
    /** Whether to draw the objects instead of the gray values. */
    this.showsObjects = false;
    /** @type {number | undefined} */
    this.frameRequestId = undefined;
    /** The values from which each texture was created. If a value changes, the texture is created again. @type {Map<string, unknown[]>} */
    this.textureInputs = new Map();
    /** Ids of the objects at the sampled voxels. */
    this.ids = new Uint32Array();
    this.gl = canvas.getContext("webgl2", { preserveDrawingBuffer: true });
    if (this.gl) this.program = createProgram(this.gl);
  }

  get isSupported() {
    return this.gl !== null;
  }

  /** Draw in the next frame. @param {() => void} ondraw called after drawing */
  draw(ondraw) {
    this.frameRequestId ??= requestAnimationFrame(() => {
      this.frameRequestId = undefined;
      if (this.#drawNow()) ondraw();
    });
  }

  /** Create the textures again before the next drawing, because voxels were changed in place. */
  invalidate() {
    this.textureInputs.clear();
  }

  /** @returns {boolean} whether there was something to draw */
  #drawNow() {
    const { gl, program, canvas, camera } = this;
    const { image, voxelSize, selectedId } = this.scene.state;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!gl || !program || image === null || width === 0) return false;
    camera.setExtents([2, 1, 0].map((axis) => image.shape[axis] * voxelSize[axis]));
    this.#updateTextures(gl);
    canvas.width = width;
    canvas.height = height;
    gl.viewport(0, 0, width, height);
    gl.useProgram(program);
    const getLocation = (/** @type {string} */ name) => gl.getUniformLocation(program, name);
    for (const [unit, name] of ["gray", "mask", "ids", "colors"].entries()) gl.uniform1i(getLocation(name), unit);
    const { low, high } = camera.limits;
    const visibleSize = camera.getWindow(width, height);
    gl.uniform2fv(getLocation("window"), visibleSize);
    gl.uniform1f(getLocation("lineWidth"), (LINE_PIXELS * 2 * visibleSize[0]) / width);
    for (const [name, value] of Object.entries({ box: camera.box, low, high })) gl.uniform3fv(getLocation(name), value);
    gl.uniform1i(getLocation("showObjects"), Number(this.showsObjects));
    gl.uniform1ui(getLocation("selectedId"), selectedId);
    gl.uniformMatrix3fv(getLocation("rotation"), false, camera.directions.flat());
    gl.drawArrays(gl.TRIANGLES, 0, 3);
    return true;
  }

  /** Load the displayed volumes into textures, unless the textures are up to date. @param {WebGL2RenderingContext} gl */
  #updateTextures(gl) {
    const { image, labels, hiddenFlags, colorIndices, contrast } = this.scene.state;
    if (image === null) return;
    /** @type {{indices: Uint32Array, shape: Triple} | undefined} */
    let cachedSamples;
    const getSamples = () => (cachedSamples ??= computeSampleIndices(image.shape));
    this.#updateTexture("gray", [image, ...contrast], () => {
      const { indices, shape } = getSamples();
      const scale = 255 / (contrast[1] - contrast[0]);
      const gray = Uint8Array.from(indices, (index) =>
        Math.max(0, Math.min(255, (image.data[index] - contrast[0]) * scale)),
      );
      loadTexture(gl, 0, shape, gl.R8, gl.RED, gl.UNSIGNED_BYTE, gray, gl.LINEAR);
    });
    this.#updateTexture("ids", [image, labels], () => {
      const { indices, shape } = getSamples();
      this.ids = labels ? Uint32Array.from(indices, (index) => labels.data[index]) : new Uint32Array(indices.length);
      loadTexture(gl, 2, shape, gl.R32UI, gl.RED_INTEGER, gl.UNSIGNED_INT, this.ids, gl.NEAREST);
    });
    this.#updateTexture("mask", [image, labels, hiddenFlags, colorIndices], () => {
      const colors = createColors(this.ids, hiddenFlags, colorIndices);
      loadColors(gl, colors);
      const { ids } = this;
      const mask = new Uint8Array(ids.length);
      for (let index = 0; index < ids.length; index += 1) mask[index] = colors[ids[index]] >>> 24;
      loadTexture(gl, 1, getSampledShape(image.shape), gl.R8, gl.RED, gl.UNSIGNED_BYTE, mask, gl.LINEAR);
    });
  }

  /** Create a texture if a value has changed. @param {string} name @param {unknown[]} inputs values from which the texture is created @param {() => void} create */
  #updateTexture(name, inputs, create) {
    const previousInputs = this.textureInputs.get(name);
    if (previousInputs && inputs.every((value, index) => value === previousInputs[index])) return;
    this.textureInputs.set(name, inputs);
    create();
  }
}

/** Return the color of each id as ABGR pixels in rows of `COLORS_PER_ROW`. Hidden objects and the background are transparent. @param {Uint32Array} ids @param {Uint8Array | null} hiddenFlags @param {Uint8Array | null} colorIndices */
function createColors(ids, hiddenFlags, colorIndices) {
  let maxId = 0;
  for (let index = 0; index < ids.length; index += 1) if (ids[index] > maxId) maxId = ids[index];
  const colors = new Uint32Array(COLORS_PER_ROW * (Math.floor(maxId / COLORS_PER_ROW) + 1));
  for (let id = 1; id <= maxId; id += 1)
    if (!hiddenFlags?.[id]) colors[id] = COLORS[colorIndices?.[id] ?? getColorIndex(id)];
  return colors;
}

/** Load the colors of the ids into a texture. @param {WebGL2RenderingContext} gl @param {Uint32Array} colors */
function loadColors(gl, colors) {
  gl.activeTexture(gl.TEXTURE3);
  const pixels = new Uint8Array(colors.buffer);
  const height = colors.length / COLORS_PER_ROW;
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA8, COLORS_PER_ROW, height, 0, gl.RGBA, gl.UNSIGNED_BYTE, pixels);
}

/** @param {Triple} shape @param {number} step @returns {Triple} */
function divideShape(shape, step) {
  return [Math.ceil(shape[0] / step), Math.ceil(shape[1] / step), Math.ceil(shape[2] / step)];
}

/** @param {Triple} shape @returns {number} the smallest step along each axis with which a volume fits in a texture */
function chooseTextureStep(shape) {
  let step = 1;
  while (divideShape(shape, step).reduce((product, length) => product * length, 1) > MAX_TEXTURE_VOXELS) step += 1;
  return step;
}

/** @param {Triple} shape @returns {Triple} the shape of the texture of a volume */
function getSampledShape(shape) {
  return divideShape(shape, chooseTextureStep(shape));
}

/** Return the indices of every n-th voxel along each axis, with the smallest n with which the volume fits in a texture. @param {Triple} shape */
function computeSampleIndices(shape) {
  const step = chooseTextureStep(shape);
  const sampledShape = divideShape(shape, step);
  const [depth, height, width] = sampledShape;
  const indices = new Uint32Array(depth * height * width);
  let count = 0;
  for (let z = 0; z < depth; z += 1) {
    for (let y = 0; y < height; y += 1) {
      const row = (z * step * shape[1] + y * step) * shape[2];
      for (let x = 0; x < width; x += 1) indices[count++] = row + x * step;
    }
  }
  return { indices, shape: sampledShape };
}

/**
 * Load data into a 3D texture.
 * @param {WebGL2RenderingContext} gl @param {number} unit @param {Triple} shape @param {number} internalFormat @param {number} format
 * @param {number} type @param {ArrayBufferView} data @param {number} filter
 */
function loadTexture(gl, unit, shape, internalFormat, format, type, data, filter) {
  gl.activeTexture(gl.TEXTURE0 + unit);
  gl.deleteTexture(gl.getParameter(gl.TEXTURE_BINDING_3D));
  gl.bindTexture(gl.TEXTURE_3D, gl.createTexture());
  for (const wrap of [gl.TEXTURE_WRAP_S, gl.TEXTURE_WRAP_T, gl.TEXTURE_WRAP_R])
    gl.texParameteri(gl.TEXTURE_3D, wrap, gl.CLAMP_TO_EDGE);
  for (const kind of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_3D, kind, filter);
  gl.pixelStorei(gl.UNPACK_ALIGNMENT, 1);
  gl.texImage3D(gl.TEXTURE_3D, 0, internalFormat, shape[2], shape[1], shape[0], 0, format, type, data);
}

/** Create the program, a triangle that covers the canvas, and the texture for the colors of the objects. @param {WebGL2RenderingContext} gl */
function createProgram(gl) {
  const program = gl.createProgram();
  for (const [kind, source] of /** @type {[number, string][]} */ ([
    [gl.VERTEX_SHADER, VERTEX_SHADER_SOURCE],
    [gl.FRAGMENT_SHADER, FRAGMENT_SHADER_SOURCE],
  ])) {
    const shader = /** @type {WebGLShader} */ (gl.createShader(kind));
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    if (!gl.getShaderParameter(shader, gl.COMPILE_STATUS))
      throw new Error(gl.getShaderInfoLog(shader) ?? "The browser could not compile a shader.");
    gl.attachShader(program, shader);
  }
  gl.bindAttribLocation(program, 0, "corner");
  gl.linkProgram(program);
  gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
  gl.bufferData(gl.ARRAY_BUFFER, new Float32Array([-1, -1, 3, -1, -1, 3]), gl.STATIC_DRAW);
  gl.enableVertexAttribArray(0);
  gl.vertexAttribPointer(0, 2, gl.FLOAT, false, 0, 0);
  gl.activeTexture(gl.TEXTURE3);
  gl.bindTexture(gl.TEXTURE_2D, gl.createTexture());
  for (const kind of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_2D, kind, gl.NEAREST);
  return program;
}
