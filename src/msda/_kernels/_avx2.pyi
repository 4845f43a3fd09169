from msda._kernels._baseline import Call as Call
