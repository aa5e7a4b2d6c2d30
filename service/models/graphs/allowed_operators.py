"""Operators that networks from files may call. They operate on tensors and do not access files or processes."""

from __future__ import annotations

# TorchScript `prim::` operators: control flow, numbers, lists and tensors. None accepts files, classes or processes.
_PRIM_NAMES = """
abs AutogradAnyNonZero Constant ConstantChunk data device DictConstruct dtype GetAttr If ImplicitTensorToNum is_cuda
isinstance layout ListConstruct ListUnpack Loop max min NumToTensor RaiseException requires_grad TupleConstruct
TupleIndex TupleUnpack unchecked_cast unchecked_unwrap_optional Uninitialized
"""
# PyTorch `aten::` operators, used by TorchScript files and by graphs exported by torch.export.
_ATEN_NAMES = """
__and__ __contains__ __derive_index __getitem__ __is__ __isnot__ __not__ __or__ __range_length _convolution
_convolution_mode _set_item _softmax _upsample_bicubic2d_aa _upsample_bilinear2d_aa
_upsample_lanczos2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d abs
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool3d add add_ addcmul addmm alpha_dropout
amax amin append arange argmax argmin as_tensor avg_pool2d avg_pool3d baddbmm batch_norm bilinear bitwise_and
bitwise_not bitwise_or bmm Bool broadcast_tensors cat ceil celu chunk clamp clamp_ clamp_max clamp_min clone concat
constant_pad_nd contiguous conv1d conv2d conv3d conv_transpose2d conv_transpose3d copy copy_ cos cosine_similarity
cumsum detach device dim div div_ dropout dropout_ einsum elu elu_ eq erf exp expand expand_as extend eye
feature_alpha_dropout feature_dropout feature_dropout_ fill_ flatten flip Float FloatImplicit floor floor_divide
floordiv format full full_like gather ge gelu glu group_norm gt hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh
hardtanh_ index_select insert instance_norm Int IntImplicit is_floating_point isnan item layer_norm le leaky_relu
leaky_relu_ len lerp linear linspace list log log1p log_softmax logical_and logical_not logical_or logical_xor
logsigmoid lt masked_fill masked_fill_ matmul max max_pool2d max_pool3d max_pool3d_with_indices maximum mean meshgrid
min minimum mish mul mul_ narrow ne neg new_full new_zeros norm numel ones ones_like pad permute pixel_shuffle
pixel_unshuffle pop pow prelu prod reciprocal reflection_pad3d relu relu6 relu6_ relu_ remainder repeat
repeat_interleave replication_pad2d replication_pad3d reshape resolve_conj reverse rms_norm roll rsqrt rsub
ScalarImplicit scaled_dot_product_attention select selu selu_ sigmoid sigmoid_ sign silu silu_ sin size slice softmax
softplus split split_with_sizes sqrt square squeeze squeeze_ stack std sub sub_ sum swapaxes t tan tanh tanh_ tensor
threshold threshold_ tile to transpose tril triu type_as unbind unflatten unsqueeze unsqueeze_ upsample_bicubic2d
upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d var
var_mean view view_as warn where zeros zeros_like
"""
# Operators or overloads that are allowed only in trusted programs, because for some arguments they access memory
# outside tensors, crash the process, or reinterpret memory shared with other tensors. Integer division that rounds
# toward zero crashes for the lowest integer divided by -1.
_TRUSTED_ONLY_NAMES = """
_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact2d repeat_interleave
upsample_bicubic2d upsample_bilinear2d view.dtype
div.Tensor_mode div.Scalar_mode div_.Tensor_mode div_.Scalar_mode
"""
PRIM_OPERATORS = frozenset(_PRIM_NAMES.split())
ATEN_OPERATORS = frozenset(_ATEN_NAMES.split())
TRUSTED_ONLY_OPERATORS = frozenset(_TRUSTED_ONLY_NAMES.split())
