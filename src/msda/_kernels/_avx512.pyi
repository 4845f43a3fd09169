from msda._kernels._baseline import Call as Call
from msda._kernels._baseline import Parts as Parts
