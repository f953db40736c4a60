"""Where samples come from: folders, tables, tars, and data sets as their owners distribute them."""
