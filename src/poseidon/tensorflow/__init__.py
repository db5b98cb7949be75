"""TensorFlow programs: gradients exchanged inside the graph."""
