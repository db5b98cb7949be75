"""One message of settings per layer type, in alphabetical order (form: see ``table.py``)."""

TABLE = """
message AccuracyParameter
  1 top_k uint32 = 1
  2 axis int32 = 1
  3 ignore_label int32

message ArgMaxParameter
  1 out_max_val bool
  2 top_k uint32 = 1
  3 axis int32

message BatchNormParameter
  1 use_global_stats bool
  2 moving_average_fraction float = 0.999
  3 eps float = 1e-5

message BiasParameter
  1 axis int32 = 1
  2 num_axes int32 = 1
  3 filler FillerParameter

message ClipParameter
  1 min !float
  2 max !float

message ConcatParameter
  1 concat_dim uint32 = 1
  2 axis int32 = 1

message ContrastiveLossParameter
  1 margin float = 1
  2 legacy_version bool

message ConvolutionParameter
  enum Engine DEFAULT=0 CAFFE=1 CUDNN=2
  1 num_output uint32
  2 bias_term bool = true
  3 pad *uint32
  4 kernel_size *uint32
  5 group uint32 = 1
  6 stride *uint32
  7 weight_filler FillerParameter
  8 bias_filler FillerParameter
  9 pad_h uint32
  10 pad_w uint32
  11 kernel_h uint32
  12 kernel_w uint32
  13 stride_h uint32
  14 stride_w uint32
  15 engine Engine = DEFAULT
  16 axis int32 = 1
  17 force_nd_im2col bool
  18 dilation *uint32

message CropParameter
  1 axis int32 = 2
  2 offset *uint32

message DataParameter
  enum DB LEVELDB=0 LMDB=1
  1 source string
  2 scale float = 1
  3 mean_file string
  4 batch_size uint32
  5 crop_size uint32
  6 mirror bool
  7 rand_skip uint32
  8 backend DB = LEVELDB
  9 force_encoded_color bool
  10 prefetch uint32 = 4
  1000 shared_file_system bool
  1001 shuffle_window uint32

message DropoutParameter
  1 dropout_ratio float = 0.5

message DummyDataParameter
  1 data_filler *FillerParameter
  2 num *uint32
  3 channels *uint32
  4 height *uint32
  5 width *uint32
  6 shape *BlobShape

message ELUParameter
  1 alpha float = 1

message EltwiseParameter
  enum EltwiseOp PROD=0 SUM=1 MAX=2
  1 operation EltwiseOp = SUM
  2 coeff *float
  3 stable_prod_grad bool = true

message EmbedParameter
  1 num_output uint32
  2 input_dim uint32
  3 bias_term bool = true
  4 weight_filler FillerParameter
  5 bias_filler FillerParameter

message ExpParameter
  1 base float = -1
  2 scale float = 1
  3 shift float

message FlattenParameter
  1 axis int32 = 1
  2 end_axis int32 = -1

message HDF5DataParameter
  1 source string
  2 batch_size uint32
  3 shuffle bool
  1000 shared_file_system bool

message HDF5OutputParameter
  1 file_name string

message HingeLossParameter
  enum Norm L1=1 L2=2
  1 norm Norm = L1

message ImageDataParameter
  1 source string
  2 scale float = 1
  3 mean_file string
  4 batch_size uint32 = 1
  5 crop_size uint32
  6 mirror bool
  7 rand_skip uint32
  8 shuffle bool
  9 new_height uint32
  10 new_width uint32
  11 is_color bool = true
  12 root_folder string
  1000 shared_file_system bool

message InfogainLossParameter
  1 source string
  2 axis int32 = 1

message InnerProductParameter
  1 num_output uint32
  2 bias_term bool = true
  3 weight_filler FillerParameter
  4 bias_filler FillerParameter
  5 axis int32 = 1
  6 transpose bool

message InputParameter
  1 shape *BlobShape

message LRNParameter
  enum NormRegion ACROSS_CHANNELS=0 WITHIN_CHANNEL=1
  enum Engine DEFAULT=0 CAFFE=1 CUDNN=2
  1 local_size uint32 = 5
  2 alpha float = 1
  3 beta float = 0.75
  4 norm_region NormRegion = ACROSS_CHANNELS
  5 k float = 1
  6 engine Engine = DEFAULT

message LogParameter
  1 base float = -1
  2 scale float = 1
  3 shift float

message LossParameter
  enum NormalizationMode FULL=0 VALID=1 BATCH_SIZE=2 NONE=3
  1 ignore_label int32
  2 normalize bool
  3 normalization NormalizationMode = VALID

message MVNParameter
  1 normalize_variance bool = true
  2 across_channels bool
  3 eps float = 1e-9

message MemoryDataParameter
  1 batch_size uint32
  2 channels uint32
  3 height uint32
  4 width uint32

message PReLUParameter
  1 filler FillerParameter
  2 channel_shared bool

message ParameterParameter
  1 shape BlobShape

message PoolingParameter
  enum PoolMethod MAX=0 AVE=1 STOCHASTIC=2
  enum Engine DEFAULT=0 CAFFE=1 CUDNN=2
  enum RoundMode CEIL=0 FLOOR=1
  1 pool PoolMethod = MAX
  2 kernel_size uint32
  3 stride uint32 = 1
  4 pad uint32
  5 kernel_h uint32
  6 kernel_w uint32
  7 stride_h uint32
  8 stride_w uint32
  9 pad_h uint32
  10 pad_w uint32
  11 engine Engine = DEFAULT
  12 global_pooling bool
  13 round_mode RoundMode = CEIL

message PowerParameter
  1 power float = 1
  2 scale float = 1
  3 shift float

message PythonParameter
  1 module string
  2 layer string
  3 param_str string
  4 share_in_parallel bool

message ReLUParameter
  enum Engine DEFAULT=0 CAFFE=1 CUDNN=2
  1 negative_slope float
  2 engine Engine = DEFAULT

message RecurrentParameter
  1 num_output uint32
  2 weight_filler FillerParameter
  3 bias_filler FillerParameter
  4 debug_info bool
  5 expose_hidden bool

message ReductionParameter
  enum ReductionOp SUM=1 ASUM=2 SUMSQ=3 MEAN=4
  1 operation ReductionOp = SUM
  2 axis int32
  3 coeff float = 1

message ReshapeParameter
  1 shape BlobShape
  2 axis int32
  3 num_axes int32 = -1

message SPPParameter
  enum PoolMethod MAX=0 AVE=1 STOCHASTIC=2
  enum Engine DEFAULT=0 CAFFE=1 CUDNN=2
  1 pyramid_height uint32
  2 pool PoolMethod = MAX
  6 engine Engine = DEFAULT

message ScaleParameter
  1 axis int32 = 1
  2 num_axes int32 = 1
  3 filler FillerParameter
  4 bias_term bool
  5 bias_filler FillerParameter

message SigmoidParameter
  enum Engine DEFAULT=0 CAFFE=1 CUDNN=2
  1 engine Engine = DEFAULT

message SliceParameter
  1 slice_dim uint32 = 1
  2 slice_point *uint32
  3 axis int32 = 1

message SoftmaxParameter
  enum Engine DEFAULT=0 CAFFE=1 CUDNN=2
  1 engine Engine = DEFAULT
  2 axis int32 = 1

message SwishParameter
  1 beta float = 1

message TanHParameter
  enum Engine DEFAULT=0 CAFFE=1 CUDNN=2
  1 engine Engine = DEFAULT

message ThresholdParameter
  1 threshold float

message TileParameter
  1 axis int32 = 1
  2 tiles int32

message TransformationParameter
  1 scale float = 1
  2 mirror bool
  3 crop_size uint32
  4 mean_file string
  5 mean_value *float
  6 force_color bool
  7 force_gray bool

message WindowDataParameter
  1 source string
  2 scale float = 1
  3 mean_file string
  4 batch_size uint32
  5 crop_size uint32
  6 mirror bool
  7 fg_threshold float = 0.5
  8 bg_threshold float = 0.5
  9 fg_fraction float = 0.25
  10 context_pad uint32
  11 crop_mode string = warp
  12 cache_images bool
  13 root_folder string
  1000 shared_file_system bool
"""
