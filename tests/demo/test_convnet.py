import torch
from torch.nn import functional as F

from lockstep.demo import ConvNet


def test_convnet_has_the_classic_parameters() -> None:
    shapes = {name: tuple(value.shape) for name, value in ConvNet().state_dict().items()}
    assert shapes == {
        "conv1.weight": (10, 1, 5, 5),
        "conv1.bias": (10,),
        "conv2.weight": (20, 10, 5, 5),
        "conv2.bias": (20,),
        "fc1.weight": (50, 320),
        "fc1.bias": (50,),
        "fc2.weight": (10, 50),
        "fc2.bias": (10,),
    }


def test_convnet_computes_what_the_tutorials_net_does() -> None:
    torch.manual_seed(0)
    net, images = ConvNet().eval(), torch.randn(3, 1, 28, 28)
    x = F.relu(F.max_pool2d(net.conv1(images), 2))
    x = F.relu(F.max_pool2d(net.conv2(x), 2))
    expected = F.log_softmax(net.fc2(F.relu(net.fc1(x.view(-1, 320)))), dim=1)
    assert torch.equal(net(images), expected)


def test_convnet_without_dropout_computes_the_same_in_training() -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 1, 28, 28)
    net = ConvNet(dropout=0.0)
    assert torch.equal(net.train()(images), net.eval()(images))
    net = ConvNet()
    assert not torch.equal(net.train()(images), net.eval()(images))
