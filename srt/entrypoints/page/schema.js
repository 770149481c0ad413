// Checks a value against a JSON Schema, by the keywords that the server enforces: docs/structured-output.md lists them.

const KINDS = {
  null: (value) => value === null,
  boolean: (value) => typeof value === "boolean",
  integer: Number.isInteger,
  number: (value) => typeof value === "number",
  string: (value) => typeof value === "string",
  array: Array.isArray,
  object: (value) => typeof value === "object" && value !== null && !Array.isArray(value),
};

const DATE = String.raw`\d{4}-\d\d-\d\d`;
const TIME = String.raw`(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)`;
const NAME = String.raw`[a-z\d](?:[a-z\d-]{0,61}[a-z\d])?`;
const BYTE = String.raw`(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)`;
const FORMATS = {
  date: (text) => fits(DATE, text) && isDay(text),
  time: (text) => fits(TIME, text),
  "date-time": (text) => fits(`${DATE}T${TIME}`, text) && isDay(text.slice(0, 10)),
  duration: (text) => fits(String.raw`P(?=.)(?:\d+W|(?:\d+Y)?(?:\d+M)?(?:\d+D)?(?:T(?=\d)(?:\d+H)?(?:\d+M)?(?:\d+S)?)?)`, text),
  email: (text) => fits(String.raw`[^@\s]+@[^@\s]+`, text),
  hostname: (text) => text.length <= 253 && fits(String.raw`${NAME}(?:\.${NAME})*`, text),
  ipv4: (text) => fits(String.raw`(?:${BYTE}\.){3}${BYTE}`, text),
  ipv6: (text) => fits(String.raw`[\da-f:.]+`, text) && URL.canParse(`ws://[${text}]`),
  uuid: (text) => fits(String.raw`[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}`, text),
  uri: (text) => fits(String.raw`[a-z][a-z\d+.-]*:[^\s<>"{}|\\^\x60]*`, text),
};

// Keyword -> the check of one kind of value. It returns a reason, a flaw found further inside, or null.
const FOR_ANY = {
  type: (value, kinds) => unless([kinds].flat().some((kind) => KINDS[kind]?.(value)), `must be of the type ${[kinds].flat().join(" or ")}`),
  const: (value, only) => unless(isSame(value, only), `must be ${JSON.stringify(only)}`),
  enum: (value, ones) => unless(ones.some((one) => isSame(value, one)), `must be one of ${ones.map((one) => JSON.stringify(one)).join(", ")}`),
  $ref: (value, pointer, at) => at.flaw(value, at.target(pointer)),
  allOf: (value, schemas, at) => first(schemas, (schema) => at.flaw(value, schema)),
  anyOf: (value, schemas, at) => unless(schemas.some((schema) => !at.flaw(value, schema)), "fits none of the schemas in anyOf"),
  oneOf: (value, schemas, at) => {
    const count = schemas.filter((schema) => !at.flaw(value, schema)).length;
    return unless(count === 1, `fits ${count} of the schemas in oneOf instead of one`);
  },
};
const FOR_NUMBERS = {
  minimum: (value, least) => unless(value >= least, `must be at least ${least}`),
  maximum: (value, most) => unless(value <= most, `must be at most ${most}`),
  exclusiveMinimum: (value, bound) => unless(value > bound, `must be above ${bound}`),
  exclusiveMaximum: (value, bound) => unless(value < bound, `must be below ${bound}`),
  multipleOf: (value, step) => unless(isWhole(value / step), `must be a multiple of ${step}`),
};
const FOR_STRINGS = {
  minLength: (text, least) => unless([...text].length >= least, `must have at least ${least} characters`),
  maxLength: (text, most) => unless([...text].length <= most, `must have at most ${most} characters`),
  pattern: (text, pattern) => unless(expression(pattern).test(text), `must match ${pattern}`),
  format: (text, name) => unless(FORMATS[name]?.(text) ?? true, `must have the format ${name}`),
};
const FOR_ARRAYS = {
  minItems: (list, least) => unless(list.length >= least, `must have at least ${least} items`),
  maxItems: (list, most) => unless(list.length <= most, `must have at most ${most} items`),
  prefixItems: itemsOneByOne,
  items: (list, schema, at) => Array.isArray(schema) // before 2020-12, what prefixItems is now
    ? itemsOneByOne(list, schema, at)
    : itemsFrom(at.schema.prefixItems?.length ?? 0, list, schema, at),
  additionalItems: (list, schema, at) => Array.isArray(at.schema.items)
    ? itemsFrom(at.schema.items.length, list, schema, at)
    : null,
};
const FOR_OBJECTS = {
  required: (object, names) => first(names, (name) => unless(Object.hasOwn(object, name), `must have the property ${name}`)),
  minProperties: (object, least) => unless(Object.keys(object).length >= least, `must have at least ${least} properties`),
  maxProperties: (object, most) => unless(Object.keys(object).length <= most, `must have at most ${most} properties`),
  properties: (object, schemas, at) => first(Object.keys(schemas), (name) =>
    Object.hasOwn(object, name) ? at.flaw(object[name], schemas[name], `.${name}`) : null),
  patternProperties: (object, schemas, at) => first(Object.keys(schemas), (pattern) =>
    first(Object.keys(object), (name) =>
      expression(pattern).test(name) ? at.flaw(object[name], schemas[pattern], `.${name}`) : null)),
  additionalProperties: (object, schema, at) => first(Object.keys(object), (name) => {
    if (Object.hasOwn(at.schema.properties ?? {}, name)) return null;
    if (Object.keys(at.schema.patternProperties ?? {}).some((pattern) => expression(pattern).test(name))) return null;
    return schema === false ? `may not have the property ${name}` : at.flaw(object[name], schema, `.${name}`);
  }),
};

/** Return what is wrong with the value, in words, or null if it is valid. Throw an Error if the schema cannot be checked here. */
export function flawOf(value, schema) {
  return flawAt(value, schema, schema, "");
}

function flawAt(value, schema, root, place) {
  if (schema === true) return null;
  const words = (reason) => `${place.replace(/^\./, "") || "the answer"} ${reason}`;
  if (schema === false) return words("must not be there");
  const at = {
    schema,
    flaw: (inner, its, step = "") => {
      const found = flawAt(inner, its, root, place + step);
      return found === null ? null : { found };
    },
    target: (pointer) => targetOf(root, pointer),
  };
  const checks = { ...FOR_ANY, ...checksOf(value) };
  for (const [keyword, wanted] of Object.entries(schema)) {
    const flaw = Object.hasOwn(checks, keyword) ? checks[keyword](value, wanted, at) : null;
    if (flaw !== null) return flaw.found ?? words(flaw);
  }
  return null;
}

function checksOf(value) {
  if (typeof value === "number") return FOR_NUMBERS;
  if (typeof value === "string") return FOR_STRINGS;
  if (Array.isArray(value)) return FOR_ARRAYS;
  return KINDS.object(value) ? FOR_OBJECTS : {};
}

function itemsOneByOne(list, schemas, at) {
  return first(list.slice(0, schemas.length).keys(), (index) => at.flaw(list[index], schemas[index], `[${index}]`));
}

function itemsFrom(start, list, schema, at) {
  return first(list.slice(start).keys(), (index) => at.flaw(list[start + index], schema, `[${start + index}]`));
}

function targetOf(root, pointer) {
  let node = root;
  for (const part of decodeURIComponent(pointer.slice(1)).split("/").slice(1)) {
    node = node?.[part.replaceAll("~1", "/").replaceAll("~0", "~")];
  }
  if (!pointer.startsWith("#") || node === undefined) throw new Error(`the schema has nothing at ${pointer}`);
  return node;
}

function unless(isRight, reason) {
  return isRight ? null : reason;
}

/** Return the first flaw that `check` finds in one of the entries, or null. */
function first(entries, check) {
  for (const entry of entries) {
    const flaw = check(entry);
    if (flaw !== null) return flaw;
  }
  return null;
}

function isSame(one, other) {
  if (Array.isArray(one) !== Array.isArray(other)) return false;
  if (typeof one !== "object" || typeof other !== "object" || one === null || other === null) return one === other;
  const names = Object.keys(one);
  return names.length === Object.keys(other).length
    && names.every((name) => Object.hasOwn(other, name) && isSame(one[name], other[name]));
}

/** Tell whether a quotient is an integer, up to the rounding of floats: 0.3 is a multiple of 0.1. */
function isWhole(quotient) {
  return Math.abs(quotient - Math.round(quotient)) <= 1e-9 * Math.max(1, Math.abs(quotient));
}

function isDay(text) {
  const day = new Date(`${text}T00:00:00Z`);
  return !Number.isNaN(day.getTime()) && day.toISOString().startsWith(text);
}

function fits(pattern, text) {
  return new RegExp(`^(?:${pattern})$`, "i").test(text);
}

function expression(pattern) {
  try {
    return new RegExp(pattern, "u");
  } catch {
    throw new Error(`this browser cannot read the expression ${pattern}`);
  }
}
