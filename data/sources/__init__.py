"""Where samples come from: folders of classes, how their classes are numbered, and the digits."""
