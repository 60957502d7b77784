// A candidate of etcd's Go package concurrency, for the tests.
//
//	candidate ADDRESSES elect NAME PROPOSAL TTL [COMMAND]
//	candidate ADDRESSES observe NAME
//	candidate ADDRESSES lock NAME TTL
//
// It prints `leads KEY REVISION` when it is elected. It runs
// COMMAND, if given, while it leads, and each line of its standard input is its new proposal. When
// it is interrupted it resigns. When its session has ended it prints `lost` and ends. An observer
// prints `leader KEY REVISION PROPOSAL` for each leader and each proposal.
package main

import (
	"bufio"
	"context"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/clientv3"
	"go.etcd.io/etcd/clientv3/concurrency"
)

// The client goes to another member if one does not answer for so long.
const ping = 2 * time.Second

func main() {
	log.SetFlags(0)
	if len(os.Args) < 4 {
		log.Fatal("usage: candidate ADDRESSES elect|observe|lock NAME …")
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            strings.Split(os.Args[1], ","),
		DialTimeout:          5 * time.Second,
		DialKeepAliveTime:    ping,
		DialKeepAliveTimeout: ping,
	})
	check(err)
	defer client.Close()
	interrupted, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	switch kind, name, rest := os.Args[2], os.Args[3], os.Args[4:]; {
	case kind == "elect" && len(rest) >= 2:
		elect(interrupted, client, name, rest[0], rest[1], strings.Join(rest[2:], " "))
	case kind == "lock" && len(rest) == 1:
		lock(interrupted, client, name, rest[0])
	case kind == "observe":
		observe(interrupted, client, name)
	default:
		log.Fatalf("unknown arguments: %v", os.Args[2:])
	}
}

func elect(interrupted context.Context, client *clientv3.Client, name, proposal, ttl, command string) {
	session := open(client, ttl)
	election := concurrency.NewElection(session, name)
	if err := election.Campaign(interrupted, proposal); err != nil {
		session.Close()
		log.Fatal(err)
	}
	fmt.Println("leads", election.Key(), election.Rev())
	work := exec.Command("true")
	if command != "" {
		work = exec.Command("sh", "-c", command)
		work.Stdout, work.Stderr = os.Stdout, os.Stderr
	}
	check(work.Start())
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			check(election.Proclaim(interrupted, lines.Text()))
		}
	}()
	hold(interrupted, session, func() {
		work.Process.Kill()
		work.Wait()
	}, election.Resign)
}

func lock(interrupted context.Context, client *clientv3.Client, name, ttl string) {
	session := open(client, ttl)
	mutex := concurrency.NewMutex(session, name)
	if err := mutex.Lock(interrupted); err != nil {
		session.Close()
		log.Fatal(err)
	}
	fmt.Println("leads", mutex.Key(), mutex.Header().Revision)
	hold(interrupted, session, func() {}, mutex.Unlock)
}

// hold waits for the end of a term.
func hold(
	interrupted context.Context,
	session *concurrency.Session,
	end func(),
	release func(context.Context) error,
) {
	select {
	case <-session.Done():
		end()
		fmt.Println("lost")
	case <-interrupted.Done():
		end()
		check(release(context.Background()))
		check(session.Close())
	}
}

func observe(interrupted context.Context, client *clientv3.Client, name string) {
	session := open(client, "60")
	defer session.Close()
	for seen := range concurrency.NewElection(session, name).Observe(interrupted) {
		for _, each := range seen.Kvs {
			fmt.Println("leader", string(each.Key), each.CreateRevision, string(each.Value))
		}
	}
}

func open(client *clientv3.Client, ttl string) *concurrency.Session {
	seconds, err := strconv.Atoi(ttl)
	check(err)
	session, err := concurrency.NewSession(client, concurrency.WithTTL(seconds))
	check(err)
	return session
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
