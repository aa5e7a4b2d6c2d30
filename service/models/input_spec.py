"""The section `input` of a model file: channels, voxel size, object diameter, normalization and windows."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from service.core.errors import BadParameter
from service.core.quantities import Diameter
from service.models.spec_parts import FrozenModel, Normalization

# Strings without control characters, which are safe in terminals, HTTP headers and OME-XML.
SingleLineText = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
PositiveTriple = tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class Input(FrozenModel):
    """The input of the network.

    channels           number of channels, in the order of `channel_names` if specified
    voxel_size         (z, y, x) in um to which volumes are resampled, or None for no resampling
    diameter           object diameter in voxels for which the model works best, or None if requests cannot specify one
    default_diameter   object diameter in the stack that is used if a request does not specify one, such as 2.5,18,18px
    estimate_diameter  whether the diameter is estimated if a request does not specify it. An estimate replaces a
                       `default_diameter` only if the confidence of the model is calibrated, and clearly higher
    normalisation      normalization of all channels, or of each channel
    roi_size           window size (z, y, x) in voxels, the only spatial shape with which the network is called
    roi_multiple       window sizes in requests must be multiples of these numbers (z, y, x); None if requests cannot
                       override the window, because the network is not fully convolutional
    tiling             program whose positions and Gaussian weights of windows are used
    padding            padding of volumes that are shorter than the window along two or three axes: zeros, or mirror
                       images of the volume. Volumes that are short along only one axis are padded with zeros
    resampling         how volumes are resampled to `voxel_size`: linearly, with labels from the nearest voxel, or as in
                       nnU-Net, with cubic splines, and with scores that are resampled before they become labels
    crop_zeros         whether planes of zeros at the faces of a volume are removed first and become background
    mirror_axes        axes along which windows are mirrored with `quality=best`, in all combinations; None for the
                       views that suit most models
    """

    channels: PositiveInt = 1
    channel_names: tuple[SingleLineText, ...] = ()
    voxel_size: PositiveTriple | None = None
    diameter: PositiveFloat | None = None
    default_diameter: SingleLineText | None = None
    estimate_diameter: bool = False
    normalisation: Normalization | tuple[Normalization, ...]
    roi_size: tuple[PositiveInt, PositiveInt, PositiveInt]
    roi_multiple: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    tiling: Literal["monai", "nnunet"] = "monai"
    padding: Literal["zeros", "mirror"] = "zeros"
    resampling: Literal["linear", "nnunet"] = "linear"
    crop_zeros: bool = False
    mirror_axes: tuple[Literal["z", "y", "x"], ...] | None = None

    def get_normalization(self, channel: int) -> Normalization:
        """Return the normalization of a channel."""
        return self.normalisation[channel] if isinstance(self.normalisation, tuple) else self.normalisation

    @model_validator(mode="after")
    def _check_normalization(self) -> Self:
        if isinstance(self.normalisation, tuple) and len(self.normalisation) != self.channels:
            raise ValueError(
                f"normalisation must be one mapping, or a list with one mapping for each of the "
                f"{self.channels} channels"
            )
        return self

    @property
    def usual_diameter(self) -> Diameter | None:
        """The default diameter as a quantity; None if there is no default."""
        return None if self.default_diameter is None else Diameter.parse(self.default_diameter)

    @model_validator(mode="after")
    def _check_default_diameter(self) -> Self:
        try:
            has_unused_default = self.usual_diameter is not None and self.diameter is None
        except BadParameter as error:
            raise ValueError(f"input.default_diameter: {error}") from error
        if has_unused_default:
            raise ValueError("input.default_diameter requires input.diameter, to which stacks are resampled")
        return self

    @model_validator(mode="after")
    def _check_multiple(self) -> Self:
        multiples = self.roi_multiple or (1, 1, 1)
        if any(length % multiple for length, multiple in zip(self.roi_size, multiples, strict=True)):
            raise ValueError("roi_size must be a multiple of roi_multiple")
        return self
