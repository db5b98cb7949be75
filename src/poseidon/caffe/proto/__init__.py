"""Where pycaffe's users look for the messages: ``from poseidon.caffe.proto import caffe_pb2``."""
