// Reads embeddings from text and files. Each function returns a list of rows, each a list of numbers, or throws an Error
// that says what is wrong.

// The page comes with the names of columns that all commands know: EMBEDDING_COLUMNS and OTHER_COLUMNS.

// Numbers with commas, semicolons or spaces between them, perhaps in brackets.
function readNumbers(text, where) {
  const words = text.replace(/^\s*\[|\]\s*$/g, "").split(/[\s,;]+/).filter(Boolean);
  return words.map((word, at) => {
    const number = Number(word);
    if (Number.isNaN(number)) throw new Error(`${where}number ${at + 1} is “${word.slice(0, 40)}”, which is not a number`);
    return number;
  });
}

function readJson(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`this is not valid JSON: ${error.message}`);
  }
  const rows = Array.isArray(found) ? found : found?.embeddings ?? (found?.embedding && [found.embedding]);
  if (!Array.isArray(rows)) throw new Error("the JSON must be a list of numbers, or an object with “embeddings” or “embedding”");
  return rows.length > 0 && rows.every(Array.isArray) ? rows : [rows];
}

// The cells of a line of CSV. A cell in quotes may contain commas.
function cellsOf(line) {
  const cells = [];
  for (const [, quoted, plain] of line.matchAll(/(?:^|,)(?:\s*"((?:[^"]|"")*)"\s*|([^,]*))/g)) cells.push((quoted?.replaceAll('""', '"') ?? plain).trim());
  return cells;
}

function readCsv(text) {
  const lines = text.split(/\r?\n/).filter((line) => line.trim() !== "");
  if (lines.length === 0) throw new Error("the file is empty");
  const header = cellsOf(lines[0].replace(/^\ufeff/, ""));
  const isCount = header.filter((cell) => cell !== "").every((cell, at) => Number(cell) === at);
  if (!isCount && header.every((cell) => cell !== "" && !Number.isNaN(Number(cell)))) return lines.map((line, at) => readNumbers(line, `line ${at + 1}: `));
  const names = header.map((name) => name.toLowerCase());
  const list = EMBEDDING_COLUMNS.map((name) => names.indexOf(name)).find((at) => at >= 0);
  const columns = names.map((_, at) => at).filter((at) => names[at] !== "" && !OTHER_COLUMNS.includes(names[at]));
  return lines.slice(1).map((line, at) => {
    const cells = cellsOf(line);
    const where = `line ${at + 2}: `;
    return readNumbers(list === undefined ? columns.map((column) => cells[column] ?? "").join(",") : cells[list] ?? "", where);
  });
}

function halfNumber(bits) {
  const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
  const size = exponent === 0 ? fraction * 2 ** -24 : exponent === 31 ? (fraction ? NaN : Infinity) : (1 + fraction / 1024) * 2 ** (exponent - 15);
  return bits & 0x8000 ? -size : size;
}

function readNpy(buffer) {
  const bytes = new DataView(buffer);
  const magic = new Uint8Array(buffer, 0, Math.min(6, buffer.byteLength));
  if (buffer.byteLength < 12 || String.fromCharCode(...magic) !== "\x93NUMPY") throw new Error("this is not a .npy file");
  const [start, length] = bytes.getUint8(6) === 1 ? [10, bytes.getUint16(8, true)] : [12, bytes.getUint32(8, true)];
  if (start + length > buffer.byteLength) throw new Error("the .npy file is cut short");
  const header = new TextDecoder("latin1").decode(new Uint8Array(buffer, start, length));
  const kind = /'descr':\s*'([^']*)'/.exec(header)?.[1];
  const shape = (/'shape':\s*\(([^)]*)\)/.exec(header)?.[1] ?? "").split(",").map((part) => part.trim()).filter(Boolean).map(Number);
  const [size, read] = {
    "<f2": [2, (at) => halfNumber(bytes.getUint16(at, true))],
    "<f4": [4, (at) => bytes.getFloat32(at, true)],
    "<f8": [8, (at) => bytes.getFloat64(at, true)],
  }[kind] ?? [0];
  if (size === 0) throw new Error(`the .npy file holds ${kind ?? "something unknown"}, wanted float16, float32 or float64`);
  if (/'fortran_order':\s*True/.test(header) && shape.length > 1) throw new Error("the .npy file is in Fortran order; save it with np.ascontiguousarray");
  if (shape.length < 1 || shape.length > 2) throw new Error(`the .npy file has ${shape.length} dimensions, wanted 1 or 2`);
  const [rows, width] = shape.length === 1 ? [1, shape[0]] : shape;
  if (start + length + rows * width * size > buffer.byteLength) throw new Error("the .npy file is cut short");
  return Array.from({ length: rows }, (_, row) =>
    Array.from({ length: width }, (__, at) => read(start + length + (row * width + at) * size)));
}

function readText(text) {
  const start = text.trimStart();
  if (start === "") throw new Error("paste the numbers of an embedding, or drop a file");
  if (start.startsWith("{") || start.startsWith("[[")) return readJson(text);
  return [readNumbers(text, "")];
}

async function readFile(file) {
  if (file.size > 64 * 2 ** 20) throw new Error(`${file.name} has ${Math.round(file.size / 2 ** 20)} MiB, wanted at most 64`);
  const ending = file.name.toLowerCase().split(".").pop();
  const rows = ending === "npy" ? readNpy(await file.arrayBuffer())
    : ending === "csv" ? readCsv(await file.text())
    : ending === "json" ? readJson(await file.text())
    : ending === "txt" ? readText(await file.text()) : null;
  if (rows === null) throw new Error(`${file.name}: wanted a .json, .csv or .npy file`);
  if (rows.length === 0 || rows[0].length === 0) throw new Error(`${file.name} holds no numbers`);
  return rows;
}
