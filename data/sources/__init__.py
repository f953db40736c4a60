"""Sources of samples to pack: folders of classes, the numbering of their classes, and the digits data set."""
