import numpy as np

from service.training.augmentation import augment


def test_image_and_targets_move_together_and_only_the_image_changes_its_values() -> None:
    z, y, x = np.ogrid[:6, :8, :8]
    ramp = (z + 8 * y + 70 * x).astype(np.float32) / 600
    for seed in range(30):
        image, *targets = augment(np.stack([ramp, ramp, ramp**2]), np.random.default_rng(seed))
        np.testing.assert_array_equal(np.sort(targets[0], axis=None), np.sort(ramp, axis=None))
        np.testing.assert_array_equal(targets[1], targets[0] ** 2)
        assert not np.array_equal(image, targets[0])
        assert np.corrcoef(image.ravel(), targets[0].ravel())[0, 1] > 0.8
