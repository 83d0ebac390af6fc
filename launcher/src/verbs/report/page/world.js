// A world map on a canvas: equirectangular, to zoom and to drag. The world repeats to the east and the west, so nothing is
// cut at ±180°. The globe of `serve` is a subclass.

const ZOOM_MAX = 4096;

class WorldMap {
  // `paint(map)` draws on the map, `hover(x, y, event)` and `select(x, y)` get positions in pixels; `leave()` ends hovering.
  constructor(parent, label, actions) {
    this.actions = actions;
    this.center = { lat: 0, lon: 0 };
    this.zoom = 1;
    this.pointers = new Map();
    const keys = "arrow keys move, + and - zoom, 0 shows the whole world";
    this.canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": `${label}; ${keys}` });
    this.context = this.canvas.getContext("2d");
    const button = (text, name, act) => element("button", { type: "button", title: name, "aria-label": name, onclick: act }, text);
    const buttons = element("div", { class: "zoom" },
      button("+", "Zoom in", () => this.zoomBy(2)),
      button("−", "Zoom out", () => this.zoomBy(0.5)),
      button("⤢", "Whole world", () => this.reset()));
    parent.append(element("div", { class: "map" }, this.canvas, buttons));
    add(this.canvas, {
      onpointerdown: (event) => this.press(event),
      onpointermove: (event) => this.move(event),
      onpointerup: (event) => this.release(event),
      onpointercancel: (event) => this.pointers.delete(event.pointerId),
      onpointerleave: () => this.actions.leave?.(),
      onkeydown: (event) => this.key(event),
    }, []);
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoomBy(Math.exp(-event.deltaY * (event.deltaMode === 1 ? 0.05 : 0.0018)), event.offsetX, event.offsetY);
    }, { passive: false });
    new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
    redraws.push(() => this.draw());
    this.resize();
  }

  resize() {
    this.width = Math.max(200, this.canvas.parentElement.clientWidth);
    this.height = this.heightFor(this.width);
    const density = devicePixelRatio || 1;
    [this.canvas.width, this.canvas.height] = [this.width * density, this.height * density];
    this.canvas.style.height = `${this.height}px`;
    this.context.setTransform(density, 0, 0, density, 0, 0);
    this.draw();
  }

  heightFor(width) {
    return Math.round(width / 2);
  }
  // Pixels per degree.
  get scale() {
    return (this.width / 360) * this.zoom;
  }
  get kmPerPixel() {
    return (radians(1) * EARTH_RADIUS_KM * Math.max(0.01, Math.cos(radians(this.center.lat)))) / this.scale;
  }
  x(lon) {
    return this.width / 2 + (lon - this.center.lon) * this.scale;
  }
  y(lat) {
    return this.height / 2 - (lat - this.center.lat) * this.scale;
  }
  // The position of a place, on the copy of the world whose middle is nearest.
  pixel([lat, lon]) {
    const turned = lon + 360 * Math.round((this.center.lon - lon) / 360);
    return [this.x(turned), this.y(lat)];
  }

  reset() {
    this.center = { lat: 0, lon: 0 };
    this.zoom = 1;
    this.draw();
  }

  // Shows all places, with some room around them.
  fit(places) {
    const [, lon] = places[0];
    const lons = places.map((place) => place[1] + 360 * Math.round((lon - place[1]) / 360));
    const lats = places.map((place) => place[0]);
    const range = (values) => [Math.min(...values), Math.max(...values)];
    const [[west, east], [south, north]] = [range(lons), range(lats)];
    this.zoom = 1;
    const wanted = Math.min(this.width / Math.max(0.1, (east - west) * 1.5), this.height / Math.max(0.1, (north - south) * 1.5));
    this.zoom = Math.max(1, Math.min(ZOOM_MAX, wanted / this.scale));
    this.center = { lat: (south + north) / 2, lon: (west + east) / 2 };
    this.draw();
  }

  zoomBy(factor, x = this.width / 2, y = this.height / 2) {
    const [lon, lat] = [this.center.lon + (x - this.width / 2) / this.scale, this.center.lat - (y - this.height / 2) / this.scale];
    this.zoom = Math.max(1, Math.min(ZOOM_MAX, this.zoom * factor));
    this.center = { lon: lon - (x - this.width / 2) / this.scale, lat: lat + (y - this.height / 2) / this.scale };
    this.draw();
  }

  pan(dx, dy) {
    this.center = { lon: this.center.lon - dx / this.scale, lat: this.center.lat + dy / this.scale };
    this.draw();
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    this.dragged = 0;
    this.canvas.classList.add("dragging");
  }

  move(event) {
    const now = [event.offsetX, event.offsetY];
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      this.actions.hover?.(...now, event);
      return;
    }
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const apart = (point) => Math.hypot(point[0] - other[0], point[1] - other[1]) || 1;
      this.zoomBy(apart(now) / apart(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    } else {
      this.pan(now[0] - before[0], now[1] - before[1]);
    }
    this.dragged += Math.hypot(now[0] - before[0], now[1] - before[1]);
    this.pointers.set(event.pointerId, now);
  }

  release(event) {
    if (this.pointers.delete(event.pointerId) && this.dragged < 5) this.actions.select?.(event.offsetX, event.offsetY, event);
    this.canvas.classList.remove("dragging");
  }

  key(event) {
    const act = {
      ArrowLeft: () => this.pan(this.width / 8, 0),
      ArrowRight: () => this.pan(-this.width / 8, 0),
      ArrowUp: () => this.pan(0, this.height / 8),
      ArrowDown: () => this.pan(0, -this.height / 8),
      "+": () => this.zoomBy(1.5),
      "=": () => this.zoomBy(1.5),
      "-": () => this.zoomBy(1 / 1.5),
      0: () => this.reset(),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  // The largest latitude in the middle of the map.
  get latMax() {
    return Math.max(0, 90 - this.height / 2 / this.scale);
  }

  // Draws at the next frame, once for all changes before it.
  draw() {
    this.center.lat = Math.max(-this.latMax, Math.min(this.latMax, this.center.lat));
    this.center.lon -= 360 * Math.round(this.center.lon / 360);
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => {
      this.isAsked = false;
      this.drawWorld();
      this.actions.paint(this);
      this.drawScale();
    });
  }

  drawWorld() {
    const context = this.context;
    context.fillStyle = color("sea");
    context.fillRect(0, 0, this.width, this.height);
    const half = this.width / 2 / this.scale;
    const [west, east] = [this.center.lon - half, this.center.lon + half];
    context.fillStyle = color("land");
    context.strokeStyle = color("shore");
    context.lineWidth = 0.8;
    context.beginPath();
    for (let turn = -720; turn <= 720; turn += 360) {
      if (turn + 180 < west - 180 || turn - 180 > east + 180) continue;
      for (const ring of land) {
        for (let at = 0; at < ring.length; at += 2) {
          const [x, y] = [this.x(ring[at] / 100 + turn), this.y(ring[at + 1] / 100)];
          if (at === 0) context.moveTo(x, y);
          else context.lineTo(x, y);
        }
        context.closePath();
      }
    }
    context.fill("evenodd");
    context.stroke();
    const step = [0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30].find((size) => size * this.scale >= 60) ?? 30;
    context.strokeStyle = color("grid");
    context.beginPath();
    for (let lon = Math.ceil(west / step) * step; lon <= east; lon += step) {
      context.moveTo(this.x(lon), 0);
      context.lineTo(this.x(lon), this.height);
    }
    for (let lat = -90; lat <= 90; lat += step) {
      const y = this.y(lat);
      if (y < 0 || y > this.height) continue;
      context.moveTo(0, y);
      context.lineTo(this.width, y);
    }
    context.globalAlpha = 0.7;
    context.stroke();
    context.globalAlpha = 1;
  }

  drawScale() {
    const context = this.context;
    const { kmPerPixel } = this;
    const power = 10 ** Math.floor(Math.log10(120 * kmPerPixel));
    const km = [5, 2, 1].map((factor) => factor * power).find((length) => length <= 120 * kmPerPixel);
    const [right, y] = [12 + km / kmPerPixel, this.height - 12];
    context.strokeStyle = context.fillStyle = color("ink");
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(12, y - 5);
    context.lineTo(12, y);
    context.lineTo(right, y);
    context.lineTo(right, y - 5);
    context.stroke();
    context.font = "12px system-ui, sans-serif";
    context.fillText(`${shortNumber(km)} km`, 16, y - 5);
  }

  line(points, style, width) {
    const context = this.context;
    context.strokeStyle = style;
    context.lineWidth = width;
    context.beginPath();
    const [west, east] = [Math.min, Math.max].map((end) => points.reduce((most, point) => end(most, point[1]), points[0][1]));
    for (const turn of [-360, 0, 360]) {
      if (this.x(east + turn) < 0 || this.x(west + turn) > this.width) continue;
      points.forEach(([lat, lon], at) => {
        if (at === 0) context.moveTo(this.x(lon + turn), this.y(lat));
        else context.lineTo(this.x(lon + turn), this.y(lat));
      });
    }
    context.stroke();
  }

  dot(place, radius, fill, edge) {
    const context = this.context;
    const [x, y] = this.pixel(place);
    context.beginPath();
    context.arc(x, y, radius, 0, 2 * Math.PI);
    if (fill) {
      context.fillStyle = fill;
      context.fill();
    }
    if (edge) {
      context.strokeStyle = edge;
      context.lineWidth = 2;
      context.stroke();
    }
  }
}
