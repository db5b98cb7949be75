"""Layers as the two older formats wrote them; ``upgrade.py`` turns them into the present one."""

TABLE = """
message V1LayerParameter
  enum LayerType NONE=0 ABSVAL=35 ACCURACY=1 ARGMAX=30 BNLL=2 CONCAT=3 CONTRASTIVE_LOSS=37 \
      CONVOLUTION=4 DATA=5 DECONVOLUTION=39 DROPOUT=6 DUMMY_DATA=32 EUCLIDEAN_LOSS=7 ELTWISE=25 \
      EXP=38 FLATTEN=8 HDF5_DATA=9 HDF5_OUTPUT=10 HINGE_LOSS=28 IM2COL=11 IMAGE_DATA=12 \
      INFOGAIN_LOSS=13 INNER_PRODUCT=14 LRN=15 MEMORY_DATA=29 MULTINOMIAL_LOGISTIC_LOSS=16 MVN=34 \
      POOLING=17 POWER=26 RELU=18 SIGMOID=19 SIGMOID_CROSS_ENTROPY_LOSS=27 SILENCE=36 SOFTMAX=20 \
      SOFTMAX_LOSS=21 SPLIT=22 SLICE=33 TANH=23 WINDOW_DATA=24 THRESHOLD=31
  enum DimCheckMode STRICT=0 PERMISSIVE=1
  1 layer V0LayerParameter
  2 bottom *string
  3 top *string
  4 name string
  5 type LayerType
  6 blobs *BlobProto
  7 blobs_lr *float
  8 weight_decay *float
  9 concat_param ConcatParameter
  10 convolution_param ConvolutionParameter
  11 data_param DataParameter
  12 dropout_param DropoutParameter
  13 hdf5_data_param HDF5DataParameter
  14 hdf5_output_param HDF5OutputParameter
  15 image_data_param ImageDataParameter
  16 infogain_loss_param InfogainLossParameter
  17 inner_product_param InnerProductParameter
  18 lrn_param LRNParameter
  19 pooling_param PoolingParameter
  20 window_data_param WindowDataParameter
  21 power_param PowerParameter
  22 memory_data_param MemoryDataParameter
  23 argmax_param ArgMaxParameter
  24 eltwise_param EltwiseParameter
  25 threshold_param ThresholdParameter
  26 dummy_data_param DummyDataParameter
  27 accuracy_param AccuracyParameter
  29 hinge_loss_param HingeLossParameter
  30 relu_param ReLUParameter
  31 slice_param SliceParameter
  32 include *NetStateRule
  33 exclude *NetStateRule
  34 mvn_param MVNParameter
  35 loss_weight *float
  36 transform_param TransformationParameter
  37 tanh_param TanHParameter
  38 sigmoid_param SigmoidParameter
  39 softmax_param SoftmaxParameter
  40 contrastive_loss_param ContrastiveLossParameter
  41 exp_param ExpParameter
  42 loss_param LossParameter
  1001 param *string
  1002 blob_share_mode *DimCheckMode

message V0LayerParameter
  enum PoolMethod MAX=0 AVE=1 STOCHASTIC=2
  1 name string
  2 type string
  3 num_output uint32
  4 biasterm bool = true
  5 weight_filler FillerParameter
  6 bias_filler FillerParameter
  7 pad uint32
  8 kernelsize uint32
  9 group uint32 = 1
  10 stride uint32 = 1
  11 pool PoolMethod = MAX
  12 dropout_ratio float = 0.5
  13 local_size uint32 = 5
  14 alpha float = 1
  15 beta float = 0.75
  16 source string
  17 scale float = 1
  18 meanfile string
  19 batchsize uint32
  20 cropsize uint32
  21 mirror bool
  22 k float = 1
  50 blobs *BlobProto
  51 blobs_lr *float
  52 weight_decay *float
  53 rand_skip uint32
  54 det_fg_threshold float = 0.5
  55 det_bg_threshold float = 0.5
  56 det_fg_fraction float = 0.25
  58 det_context_pad uint32
  59 det_crop_mode string = warp
  60 new_num int32
  61 new_channels int32
  62 new_height int32
  63 new_width int32
  64 shuffle_images bool
  65 concat_dim uint32 = 1
  1001 hdf5_output_param HDF5OutputParameter
"""
