import threading

import torch

from service.engine.cpu.kernel_call import Call, overheard
from service.engine.cpu.pixel_shuffle import SpaceToDepth


def fold(x):
    return SpaceToDepth((2, 2, 2))(x)


def test_every_step_is_overheard_with_what_it_took_and_nothing_before_or_after():
    heard = list[Call]()
    x = torch.randn(2, 1, 4, 6, 8)
    fold(x)
    with overheard(heard.append):
        y = fold(x)
    fold(x)
    (call,) = heard
    assert call.step == "stackseg_space_to_depth"
    assert (call.read[0].data_ptr(), call.written.data_ptr()) == (x.data_ptr(), y.data_ptr())
    assert call.sizes == (2, 1, 2, 3, 4, 2, 2, 2, 4)


def test_other_threads_are_not_overheard():
    heard = list[Call]()
    with overheard(heard.append):
        thread = threading.Thread(target=fold, args=(torch.randn(1, 1, 4, 4, 4),))
        thread.start()
        thread.join()
    assert not heard
