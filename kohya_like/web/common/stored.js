// What the browser keeps of a person's work between visits.

export function stored(key, place = localStorage) {
  try {
    return JSON.parse(place.getItem(key));
  } catch (error) {
    console.info("The browser keeps no drafts:", error.message);
    return null;
  }
}

export function store(key, value, place = localStorage) {
  try {
    place.setItem(key, JSON.stringify(value));
  } catch (error) {
    console.info("The browser keeps no drafts:", error.message);
  }
}
