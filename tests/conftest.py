import torch

torch.set_num_threads(1)  # the tensors of the tests are small: threads would only wait for each other
