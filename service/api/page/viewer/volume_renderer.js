/** Rotatable 3D rendering of the objects or of the maximum intensity, by ray casting with WebGL 2. */

import { COLORS, getColorIndex } from "../volumes/slices.js";

/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("./scene.js").Scene} Scene */

/** Maximum size of a texture. Larger volumes are subsampled. */
const MAX_TEXTURE_VOXELS = 6_000_000;
const VERTEX_SHADER_SOURCE = `#version 300 es
in vec2 corner; out vec2 screenPosition;
void main() { screenPosition = corner; gl_Position = vec4(corner, 0.0, 1.0); }`;

// The stack fills a box that is centered at the origin and whose longest edge is 2. `rotation` converts screen
// directions to stack directions.
const FRAGMENT_SHADER_SOURCE = `#version 300 es
precision highp float; precision highp int; precision highp sampler3D; precision highp usampler3D;
in vec2 screenPosition; out vec4 color;
uniform sampler3D gray, mask; uniform usampler3D ids; uniform sampler2D palette;
uniform mat3 rotation; uniform vec3 box; uniform vec2 window; uniform bool showObjects; uniform uint selectedId;
const int STEPS = 320;
vec3 toTexture(vec3 p) { return p / box * 0.5 + 0.5; }
float sampleMask(vec3 p) { return texture(mask, toTexture(p)).r; }
void main() {
  vec3 ray = rotation * vec3(0.0, 0.0, -1.0), start = rotation * vec3(screenPosition * window, 4.0);
  vec3 first = (-box - start) / ray, last = (box - start) / ray;
  vec3 low = min(first, last), high = max(first, last);
  float t = max(max(low.x, low.y), low.z), end = min(min(high.x, high.y), high.z);
  color = vec4(0.027, 0.035, 0.043, 1.0);
  if (t >= end) return;
  float stepLength = 3.5 / float(STEPS), maxGray = 0.0;
  vec3 voxelSize = 2.0 * box / vec3(textureSize(mask, 0));
  for (int n = 0; n < STEPS && t < end; n++, t += stepLength) {
    vec3 p = start + t * ray;
    if (!showObjects) { maxGray = max(maxGray, texture(gray, toTexture(p)).r); continue; }
    if (sampleMask(p) < 0.5) continue;
    float near = t - stepLength, far = t;
    for (int iteration = 0; iteration < 5; iteration++) {
      float middle = 0.5 * (near + far);
      if (sampleMask(start + middle * ray) < 0.5) near = middle; else far = middle;
    }
    p = start + far * ray;
    vec3 e = voxelSize * 1.2;
    vec3 gradient = vec3(sampleMask(p + vec3(e.x, 0, 0)) - sampleMask(p - vec3(e.x, 0, 0)),
      sampleMask(p + vec3(0, e.y, 0)) - sampleMask(p - vec3(0, e.y, 0)), sampleMask(p + vec3(0, 0, e.z)) - sampleMask(p - vec3(0, 0, e.z))) / e;
    float light = length(gradient) > 0.0 ? max(dot(normalize(gradient), ray), 0.0) : 1.0;
    // The color index is in the upper 8 bits, the id of the object in the lower 24 bits.
    uint id = 0u;
    for (int attempt = 0; attempt < 4 && id == 0u; attempt++) {
      ivec3 cell = ivec3(toTexture(p + float(attempt) * 0.5 * voxelSize * ray) * vec3(textureSize(ids, 0)));
      id = texelFetch(ids, clamp(cell, ivec3(0), textureSize(ids, 0) - 1), 0).r;
    }
    vec3 objectColor = texelFetch(palette, ivec2(int(id >> 24), 0), 0).rgb;
    if ((id & 0xffffffu) == selectedId && id != 0u) objectColor = vec3(1.0);
    float fog = 1.0 - 0.45 * smoothstep(2.6, 5.6, far);
    color = vec4(objectColor * (0.25 + 0.75 * light) * fog, 1.0);
    return;
  }
  if (!showObjects) color.rgb += vec3(maxGray);
}`;

/** Renderer that draws the scene on a canvas. */
export class VolumeRenderer {
  /** @param {HTMLCanvasElement} canvas @param {Scene} scene */
  constructor(canvas, scene) {
    this.canvas = canvas;
    this.scene = scene;
    /** Angles of rotation to the right and down, in radians. */
    this.rotation = [0.6, -0.5];
    this.zoom = 1;
    /** @type {number | undefined} */
    this.frameRequestId = undefined;
    /** The values from which the textures were created. If a value changes, the textures are created again. @type {unknown[]} */
    this.textureInputs = [];
    /** Half the size of the box that the stack fills, along x, y and z. @type {number[]} */
    this.box = [1, 1, 1];
    this.gl = canvas.getContext("webgl2", { preserveDrawingBuffer: true });
    if (this.gl) this.program = createProgram(this.gl);
    this.#addEventListeners();
  }

  get isSupported() {
    return this.gl !== null;
  }

  #addEventListeners() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
    canvas.addEventListener("pointermove", (event) => {
      if (canvas.hasPointerCapture(event.pointerId)) this.#rotate(event.movementX / 120, event.movementY / 120);
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        this.zoom = Math.max(0.4, Math.min(12, this.zoom * (event.deltaY < 0 ? 1.15 : 1 / 1.15)));
        this.draw();
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => {
      const angles = { ArrowLeft: [-0.15, 0], ArrowRight: [0.15, 0], ArrowUp: [0, -0.15], ArrowDown: [0, 0.15] };
      const keyAngles = angles[/** @type {keyof typeof angles} */ (event.key)];
      if (!keyAngles) return;
      event.preventDefault();
      this.#rotate(keyAngles[0], keyAngles[1]);
    });
  }

  /** Rotate the stack. @param {number} right @param {number} down angles in radians */
  #rotate(right, down) {
    this.rotation[0] += right;
    this.rotation[1] = Math.max(-Math.PI / 2, Math.min(Math.PI / 2, this.rotation[1] + down));
    this.draw();
  }

  /** Draw in the next frame. */
  draw() {
    this.frameRequestId ??= requestAnimationFrame(() => {
      this.frameRequestId = undefined;
      this.#drawNow();
    });
  }

  #drawNow() {
    const { gl, program, canvas } = this;
    const scene = this.scene.state;
    if (!gl || !program || scene.image === null || canvas.clientWidth === 0) return;
    this.#updateTextures();
    canvas.width = canvas.clientWidth;
    canvas.height = canvas.clientHeight;
    gl.viewport(0, 0, canvas.width, canvas.height);
    gl.useProgram(program);
    const getLocation = (/** @type {string} */ name) => gl.getUniformLocation(program, name);
    for (const [unit, name] of ["gray", "mask", "ids", "palette"].entries()) gl.uniform1i(getLocation(name), unit);
    const size = Math.min(canvas.width, canvas.height) * this.zoom;
    gl.uniform2f(getLocation("window"), (1.5 * canvas.width) / size, (1.5 * canvas.height) / size);
    gl.uniform3fv(getLocation("box"), this.box);
    gl.uniform1i(getLocation("showObjects"), scene.labels !== null && scene.showObjects ? 1 : 0);
    gl.uniform1ui(getLocation("selectedId"), scene.selectedId);
    const [right, down] = this.rotation;
    const [cosRight, sinRight, cosDown, sinDown] = [Math.cos(right), Math.sin(right), Math.cos(down), Math.sin(down)];
    // The y axis points down in the stack and up on the screen.
    gl.uniformMatrix3fv(getLocation("rotation"), false, [
      cosRight,
      0,
      sinRight,
      -sinRight * sinDown,
      -cosDown,
      cosRight * sinDown,
      sinRight * cosDown,
      -sinDown,
      -cosRight * cosDown,
    ]);
    gl.drawArrays(gl.TRIANGLES, 0, 3);
  }

  /** Load the displayed volumes into textures, unless the textures are up to date. */
  #updateTextures() {
    const { gl } = this;
    const { image, labels, hiddenFlags, colorIndices, contrast, voxelSize } = this.scene.state;
    const inputs = [image, labels, hiddenFlags, colorIndices, ...contrast, ...voxelSize];
    if (!gl || image === null || inputs.every((value, index) => value === this.textureInputs[index])) return;
    this.textureInputs = inputs;
    const extents = [2, 1, 0].map((axis) => image.shape[axis] * voxelSize[axis]);
    const maxExtent = Math.max(...extents);
    this.box = extents.map((extent) => extent / maxExtent);
    const samples = computeSampleIndices(image.shape);
    const scale = 255 / (contrast[1] - contrast[0]);
    const gray = Uint8Array.from(samples.indices, (index) =>
      Math.max(0, Math.min(255, (image.data[index] - contrast[0]) * scale)),
    );
    const packId = (/** @type {number} */ id) =>
      id === 0 || hiddenFlags?.[id] ? 0 : (((colorIndices?.[id] ?? getColorIndex(id)) << 24) | id) >>> 0;
    const ids = Uint32Array.from(samples.indices, (index) => (labels ? packId(labels.data[index]) : 0));
    const mask = Uint8Array.from(ids, (id) => (id ? 255 : 0));
    loadTexture(gl, 0, samples.shape, gl.R8, gl.RED, gl.UNSIGNED_BYTE, gray, gl.LINEAR);
    loadTexture(gl, 1, samples.shape, gl.R8, gl.RED, gl.UNSIGNED_BYTE, mask, gl.LINEAR);
    loadTexture(gl, 2, samples.shape, gl.R32UI, gl.RED_INTEGER, gl.UNSIGNED_INT, ids, gl.NEAREST);
  }
}

/** Return the indices of every n-th voxel along each axis, with the smallest n for which at most `MAX_TEXTURE_VOXELS` remain. @param {Triple} shape */
function computeSampleIndices(shape) {
  let step = 1;
  const getLengths = () => shape.map((length) => Math.ceil(length / step));
  while (getLengths().reduce((product, length) => product * length, 1) > MAX_TEXTURE_VOXELS) step += 1;
  const [depth, height, width] = getLengths();
  const indices = new Uint32Array(depth * height * width);
  let count = 0;
  for (let z = 0; z < depth; z += 1) {
    for (let y = 0; y < height; y += 1) {
      const row = (z * step * shape[1] + y * step) * shape[2];
      for (let x = 0; x < width; x += 1) indices[count++] = row + x * step;
    }
  }
  return { indices, shape: /** @type {Triple} */ ([depth, height, width]) };
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

/** Create the program, a triangle that covers the canvas, and the palette texture. @param {WebGL2RenderingContext} gl */
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
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA8, 256, 1, 0, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(COLORS.buffer));
  return program;
}
