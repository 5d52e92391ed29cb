"""The status page: Summary → fragments of HTML and SVG, and the static shell that shows them. No I/O, no state."""
