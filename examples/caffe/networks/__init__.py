"""Networks of the Caffe examples, written with NetSpec; one function per network, named in ``generate.py``."""
