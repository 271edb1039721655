// deviceplugin offers two nvidia.com/gpu to the kubelet of its node, through the kubelet's real
// protocol. There is no device behind them: a container gets an environment variable that names
// those it was given.
package main

import (
	"context"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const socket = "fairlead-tests.sock"

type plugin struct {
	api.UnimplementedDevicePluginServer
}

func (plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	devices := []*api.Device{{ID: "gpu-0", Health: api.Healthy}, {ID: "gpu-1", Health: api.Healthy}}
	if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		given := map[string]string{"TESTS_GPUS": strings.Join(container.DevicesIds, ",")}
		response.ContainerResponses = append(
			response.ContainerResponses, &api.ContainerAllocateResponse{Envs: given})
	}
	return response, nil
}

func main() {
	path := filepath.Join(api.DevicePluginPath, socket)
	os.Remove(path)
	listener, err := net.Listen("unix", path)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, plugin{})
	go server.Serve(listener)

	connection, err := grpc.NewClient(
		"unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	_, err = api.NewRegistrationClient(connection).Register(context.Background(), &api.RegisterRequest{
		Version: api.Version, Endpoint: socket, ResourceName: "nvidia.com/gpu",
	})
	if err != nil {
		log.Fatal(err)
	}
	select {}
}
